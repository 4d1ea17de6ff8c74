# shellcheck disable=SC2154,SC2034 # other parts of a script assign what is not assigned here, or use it
# ---- From here on, the text is the same in every script ------------------------------------------
# The accounts of a run: what its starts have made and used, and whether there may be another.
#
# An attempt is fruitful when the newest step in `metrics.jsonl` or among the checkpoints is higher
# than ever before. More fruitless ones in a row than the budget end the job. The account is opened
# at the start of an attempt and closed at its end, so that one which never reached its end (a dead
# node) is counted at the start of the next. It also carries the number of the attempt, by which a
# batch shell that was cut off from SLURM learns that it has been replaced.
#
# Beside it the times and GPUs of all starts are kept, for `max_requeues` and `max_gpu_hours`. A start
# that never reached its end lasted until the last sign of life in the run folder.

newest_step() { # the highest step that is logged or saved
  {
    echo 0
    tail -n 2 "$run/metrics.jsonl" | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p'
    ls "$run/checkpoints" | sed -n 's/^step-0*\([0-9][0-9]*\)$/\1/p'
  } 2>/dev/null | sort -n | tail -n 1
}

write_record() { printf '%s\n' "$*" >"$record.new" && mv "$record.new" "$record"; }

open_account() { # fails when there is nothing left to try
  local best_before fruitless_before state attempt
  best=$(newest_step)
  if [ "$chained" = no ] && [ -z "$SLURM_RESTART_COUNT" ]; then
    rm -f "$record" "$usage" # a person submitted it again
  fi
  if [ -e "$record" ]; then
    read -r best_before fruitless_before state attempt <"$record"
    if [ "$best_before" = final ]; then
      announced=yes why=$(sed 's/^final //' "$record")
      return 1
    fi
    best=$best_before fruitless=$fruitless_before
    [ "$state" = closed ] || close_account
  fi
  why='stopped on request'
  [ -z "$SLURM_RESTART_COUNT" ] || ! stop_requested || return 1
  why=$gave_up
  [ "$fruitless" -le "$budget" ] || return 1
  open_usage || return 1
  write_record "$best $fruitless open $me"
}

close_account() {
  local step
  step=$(newest_step)
  if [ "$step" -gt "$best" ]; then
    best=$step fruitless=0
  elif [ "$ended$preempted" = nono ]; then
    fruitless=$((fruitless + 1))
  fi
  write_record "$best $fruitless closed $me"
}

open_usage() { # fails when the run has had all that it may have; sets $starts and $seconds_left
  local used width=$((SLURM_NNODES * gpus))
  close_usage "$(stat -c %Y "$run"/attempts/*.json "$run/slurm.jsonl" 2>/dev/null | sort -n | tail -n 1)"
  touch "$usage"
  starts=$(wc -l <"$usage")
  code=75
  why=$often_enough
  [ -z "$max_requeues" ] || [ "$starts" -le "$max_requeues" ] || return
  if [ -n "$max_gpu_seconds" ]; then
    used=$(awk '{ sum += $2 * ($3 - $1) } END { printf "%d", sum }' "$usage")
    seconds_left=$(((max_gpu_seconds - used) / width))
    why=$gpu_hours_used
    [ "$seconds_left" -gt 0 ] || return
  fi
  code=0
  echo "$(date +%s) $width" >>"$usage"
}

close_usage() { # TIME: when the last start ended, unless that is known
  [ -e "$usage" ] || return
  awk -v end="$1" 'NF < 3 { $3 = end > $1 ? end : $1 } { print }' "$usage" >"$usage.new" &&
    mv "$usage.new" "$usage"
}

watch_gpu_hours() {
  [ -n "$max_gpu_seconds" ] || return
  { sleep "$seconds_left" && kill -s USR2 $$; } >/dev/null 2>&1 &
  timer=$!
}

superseded() { # a node cut off from SLURM may run on beside the requeued job: it must touch nothing
  local attempt
  read -r _ _ _ attempt <"$record"
  [ "$attempt" != "$me" ]
}
