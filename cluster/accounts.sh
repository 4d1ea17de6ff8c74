# shellcheck disable=SC2154,SC2034 # other parts assign what is not assigned here, or use it
# The account of a job, or of a chain of jobs: its progress and usage so far, and whether it may
# start again.
#
# An attempt makes progress when the newest step in `metrics.jsonl` or among the checkpoints is higher
# than ever before, or predictions have been stored. So it does when it saves a step beyond the one
# that it resumed from, which after a rollback may lie far behind. When more attempts in a row than the
# budget make none, the job ends. The account is opened at the start of an attempt and closed at its
# end. An attempt that never reached its end (a dead node) is counted at the start of the next one. The
# account also holds the attempt's number, so that a batch shell that was cut off from SLURM can see
# that it has been replaced.
#
# `usage` records the time and GPUs of every start, for `max_requeues` and `max_gpu_hours`. A start
# that never reached its end counts until the last heartbeat in the run folder. `begun` is as old as
# the first start: an older request to stop was another job's. `excluded` lists nodes left out.

account=$submission/accounts/$([ "$chained" = yes ] && echo chain || echo "$job")
record=$account/progress # "best no_progress open|closed attempt", or "final REASON"
usage=$account/usage     # a line for each start: begin, GPUs, end
me=$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0}
starts=0 seconds_left=0 timer='' best=0 no_progress=0

newest_step() { # FOLDER of a run: the highest step that was logged or saved
  {
    echo 0
    tail -n 2 "$1/metrics.jsonl" | sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p'
    ls "$1/checkpoints" | sed -n 's/^step-0*\([0-9][0-9]*\)$/\1/p'
  } 2>/dev/null | sort -n | tail -n 1
}

progress() { # the newest step, of all runs of a suite together, and the files of predictions
  local folder done=0
  for folder in "$run" "$run"/runs/*/; do done=$((done + $(newest_step "$folder"))); done
  [ -z "$stored" ] || done=$((done + $(ls "$stored" 2>/dev/null | wc -l)))
  echo "$done"
}

saved_ahead() { # whether this start has saved a step beyond the one that it resumed from
  local folder attempt resumed
  for folder in "$run" "$run"/runs/*/; do
    attempt=$(ls "$folder"/attempts/*.json | tail -n 1)
    resumed=$(sed -n 's/.*"checkpoints": *\[\([0-9, ]* \)*\([0-9]*\)\].*/\2/p' "$attempt")
    find "$folder/checkpoints" -path '*/step-*/trainer.json' -newer "$record" |
      sed 's|.*/step-0*\([0-9]\)|\1|; s|/.*||' |
      awk -v resumed="${resumed:-0}" '$1 > resumed { ahead = 1 } END { exit !ahead }' && return
  done 2>/dev/null
  return 1
}

stop_requested() {
  [ -e "$run/requests/stop.json" ] && [ ! "$account/begun" -nt "$run/requests/stop.json" ]
}

write_record() { printf '%s\n' "$*" >"$record.new" && mv "$record.new" "$record"; } 2>/dev/null

open_account() { # sets $verdict where the run may not start again
  local best_before no_progress_before state attempt
  if ! { mkdir -p "$account" && [ -e "$account/begun" ] || touch "$account/begun"; } 2>/dev/null; then
    refuse_folder
    return
  fi
  best=$(progress)
  if [ -s "$record" ]; then
    read -r best_before no_progress_before state attempt <"$record"
    if [ "$best_before" = final ]; then
      verdict=known why=$(sed 's/^final //' "$record")
      return
    fi
    best=$best_before no_progress=$no_progress_before
    [ "$state" = closed ] || close_account
  fi
  if [ -n "$SLURM_RESTART_COUNT" ] && stop_requested; then
    code=75 verdict=final why=$on_request
  elif [ "$no_progress" -gt "$budget" ]; then
    verdict=final why=$gave_up
  elif open_usage; then
    write_record "$best $no_progress open $me" || refuse_folder
  fi
}

refuse_folder() { # this node cannot write to it, and another may; SLURM counts how often that was tried
  code=69 verdict=requeue bad=$node why="$node cannot write to $account (read-only, full, or over quota)"
  [ "${SLURM_RESTART_COUNT:-0}" -lt "$budget" ] || verdict=final
}

close_account() {
  local step
  step=$(progress)
  if [ "$step" -gt "$best" ]; then
    best=$step no_progress=0
  elif saved_ahead; then
    no_progress=0
  elif [ "$ended$preempted" = nono ]; then
    no_progress=$((no_progress + 1))
  fi
  write_record "$best $no_progress closed $me" || say "$node cannot write to $account"
}

open_usage() { # fails when the run's limits are reached; sets $starts and $seconds_left
  local used width=$((SLURM_NNODES * gpus))
  close_usage "$(stat -c %Y "$run"/attempts/*.json "$run/slurm.jsonl" 2>/dev/null | sort -n | tail -n 1)"
  touch "$usage"
  starts=$(grep -c . "$usage")
  if [ -n "$max_requeues" ] && [ "$starts" -gt "$max_requeues" ]; then
    code=75 verdict=final why=$often_enough
    return 1
  fi
  if [ -n "$max_gpu_seconds" ]; then
    used=$(awk '{ sum += $2 * ($3 - $1) } END { printf "%d", sum }' "$usage" 2>/dev/null)
    seconds_left=$(((max_gpu_seconds - ${used:-0}) / width))
    if [ "$seconds_left" -le 0 ]; then
      code=75 verdict=final why=$gpu_hours_used
      return 1
    fi
  fi
  if ! echo "$(date +%s) $width" >>"$usage"; then
    refuse_folder
    return 1
  fi
} 2>/dev/null

close_usage() { # TIME: when the last start ended, unless that is recorded
  [ -e "$usage" ] || return
  awk -v end="$1" 'NF < 3 { $3 = end > $1 ? end : $1 } { print }' "$usage" >"$usage.new" &&
    mv "$usage.new" "$usage"
} 2>/dev/null

watch_gpu_hours() {
  [ -n "$max_gpu_seconds" ] || return
  { sleep "$seconds_left" && kill -s USR2 $$; } >/dev/null 2>&1 &
  timer=$!
}

superseded() { # a node cut off from SLURM may keep running beside the requeued job: it must not write
  local attempt
  read -r _ _ _ attempt <"$record" && [ -n "$attempt" ] && [ "$attempt" != "$me" ]
} 2>/dev/null
