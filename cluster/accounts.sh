# shellcheck disable=SC2154,SC2034 # other parts of a script assign what is not assigned here, or use it
# ---- From here on, the text is the same in every script ------------------------------------------
# The accounts of a run: its progress and usage so far, and whether it may start again.
#
# An attempt makes progress when the newest step in `metrics.jsonl` or among the checkpoints is higher
# than ever before. When more attempts in a row than the budget make none, the job ends. The account
# is opened at the start of an attempt and closed at its end. An attempt that never reached its end
# (a dead node) is counted at the start of the next one. The account also holds the attempt's number,
# so that a batch shell that was cut off from SLURM can see that it has been replaced.
#
# A second file records the time and GPUs of every start, for `max_requeues` and `max_gpu_hours`. A
# start that never reached its end counts until the last heartbeat in the run folder.

newest_step() { # the highest step that was logged or saved
  {
    echo 0
    tail -n 2 "$run/metrics.jsonl" | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p'
    ls "$run/checkpoints" | sed -n 's/^step-0*\([0-9][0-9]*\)$/\1/p'
  } 2>/dev/null | sort -n | tail -n 1
}

write_record() { printf '%s\n' "$*" >"$record.new" && mv "$record.new" "$record"; }

open_account() { # fails when the run may not start again
  local best_before no_progress_before state attempt
  best=$(newest_step)
  if [ "$chained" = no ] && [ -z "$SLURM_RESTART_COUNT" ]; then
    rm -f "$record" "$usage" "$run/requests/stop.json" # a user submitted it again
  fi
  if [ -e "$record" ]; then
    read -r best_before no_progress_before state attempt <"$record"
    if [ "$best_before" = final ]; then
      announced=yes why=$(sed 's/^final //' "$record")
      return 1
    fi
    best=$best_before no_progress=$no_progress_before
    [ "$state" = closed ] || close_account
  fi
  why='stopped on request'
  [ -z "$SLURM_RESTART_COUNT" ] || ! stop_requested || return 1
  why=$gave_up
  [ "$no_progress" -le "$budget" ] || return 1
  open_usage || return 1
  write_record "$best $no_progress open $me"
}

close_account() {
  local step
  step=$(newest_step)
  if [ "$step" -gt "$best" ]; then
    best=$step no_progress=0
  elif [ "$ended$preempted" = nono ]; then
    no_progress=$((no_progress + 1))
  fi
  write_record "$best $no_progress closed $me"
}

open_usage() { # fails when the run's limits are reached; sets $starts and $seconds_left
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

close_usage() { # TIME: when the last start ended, unless that is recorded
  [ -e "$usage" ] || return
  awk -v end="$1" 'NF < 3 { $3 = end > $1 ? end : $1 } { print }' "$usage" >"$usage.new" &&
    mv "$usage.new" "$usage"
}

watch_gpu_hours() {
  [ -n "$max_gpu_seconds" ] || return
  { sleep "$seconds_left" && kill -s USR2 $$; } >/dev/null 2>&1 &
  timer=$!
}

superseded() { # a node cut off from SLURM may keep running beside the requeued job: it must not write
  local attempt
  read -r _ _ _ attempt <"$record"
  [ "$attempt" != "$me" ]
}
