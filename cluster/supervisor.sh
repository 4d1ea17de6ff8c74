# shellcheck disable=SC2154,SC2034 # other parts of a script assign what is not assigned here, or use it
# ---- The supervisor ------------------------------------------------------------------------------
# It starts the ranks, and decides what happens when they end.
#
# It is bash, not Python, so that it works where Python exists only inside a container. It decides
# by the run's own records, the ranks' exit code, and the signals sent to the batch shell:
#
# - The run is finished when the record of this start's attempt says so, whatever the exit code.
# - Exit code 0 without that record is counted as 70. srun also returns 0 for ranks that it has lost,
#   for example when a node dies or a job is cancelled.
# - Before the time limit SLURM sends USR1. The script forwards it to the ranks, which save and
#   exit 75; then the script requeues the job.
# - TERM means that SLURM itself ends the job. The cause is `scancel`, which is final; an immediate
#   preemption, after which SLURM requeues by itself; or a time limit reached before the ranks saved.
# - In a preemption with a grace time SLURM signals only the ranks, which save and exit 75. The
#   script finds the preemption in SLURM's record of the job, and requeues it within the grace time.
# - 2 is a wrong command line; 75 without a warning is a stop on request.
# - A set-up command that fails is final: no rank starts in an incomplete environment.
# - `tandem stop` leaves a file in the run folder. It is final, whatever else happens: a copy that
#   SLURM requeues by itself does not start.
# - 1 means that a user must change something, unless the attempt made new steps or a node is bad.
#   New steps do not count where this job was refused because another job is running the run.
# - Anything else (a killed rank, a crash, a detected hang) is requeued.
# - Reaching the limit on starts or on GPU-hours is final. This shell sends itself USR2 when the
#   GPU-hours are spent; the ranks save first.
# - `at_end` is called once per run: not at a requeue, and not between the jobs of a chain.

record=$submission/progress${seed:+-$seed} # "best no_progress open|closed attempt", or "final REASON"
usage=$submission/usage${seed:+-$seed} # a line for each start: begin, GPUs, end
me=$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0}
# One array task has the array's own number as its job id, which for scontrol means all tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
node=${SLURMD_NODENAME:-$HOSTNAME}
log=$run/logs/slurm-$SLURM_JOB_ID.log # where this shell and the ranks write
plural=$([ "$budget" = 1 ] || echo s)
gave_up="gave up after $budget requeue$plural without a new step; fix the cause, then \`tandem submit\` again"
gpu_hours_used="max_gpu_hours: its $max_gpu_hours GPU-hours are spent"
often_enough="max_requeues: it has been requeued $max_requeues times, which is the limit"
starts=0 seconds_left=0 timer='' capped=no announced=no
verdict='' why='' code=0 step='' logged=0 bad='' shared=no best=0 no_progress=0
signals=0 pending='' child='' warned=no ended=no rescued=no preempted=no

say() { printf 'tandem: %s\n' "$*"; }

note() { # EVENT CODE REASON: one line for `tandem status`
  local form='{"time": %s, "job": "%s", "restart": %d, "nodes": "%s", '
  form+='"event": "%s", "code": %d, "reason": "%s"}\n'
  printf "$form" "$(date +%s)" "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" \
    "$SLURM_JOB_NODELIST" "$1" "$2" "$(printf %s "$3" | tr '"\\[:cntrl:]' "'/ ")" \
    >>"$run/slurm.jsonl"
}

stop_requested() { [ -e "$run/requests/stop.json" ]; }

newest_attempt() { ls "$run"/attempts/*.json 2>/dev/null | tail -n 1; }

refused() { # another job began the newest attempt at this run
  local newest
  newest=$(newest_attempt)
  [ -n "$newest" ] && ! grep -q "\"job\": \"$SLURM_JOB_ID\"" "$newest"
}

own_attempt() { # the record of the attempt that this start of the job began, if any
  local newest
  newest=$(newest_attempt)
  grep -q "\"job\": \"$SLURM_JOB_ID\"" "$newest" 2>/dev/null &&
    grep -q "\"restart\": ${SLURM_RESTART_COUNT:-0}[,}]" "$newest" && echo "$newest"
}

finished() {
  local own
  own=$(own_attempt) && grep -q '"finished": true' "$own"
}

deliver() {
  kill -s "$pending" "$child" 2>/dev/null
  pending=
}

timed_out() { scontrol -o show job "$job" | grep -q ' Reason=TimeLimit '; }

was_preempted() { scontrol -o show job "$job" | grep -q ' PreemptTime=[0-9]'; }

requeues() { # SLURM's own count, which is one higher as soon as SLURM has requeued this job
  scontrol -o show job "$job" | sed -n 's/.* Restarts=\([0-9]*\) .*/\1/p'
}

ended_by_slurm() { # the reason, as far as it is known
  case $(requeues)$may_requeue in
  "${SLURM_RESTART_COUNT:-0}yes") echo cancelled ;;
  "$((${SLURM_RESTART_COUNT:-0} + 1))"*) echo 'preempted, or a node failed: SLURM requeues it' ;;
  *) echo 'ended by SLURM: cancelled, preempted, or a node failed' ;;
  esac
}

rescue() { # at the time limit SLURM kills this shell with the ranks, so it requeues at once
  [ "$may_requeue" = yes ] && timed_out && scontrol requeue "$job" || return
  rescued=yes
  note requeue 0 'the time limit, before the ranks had saved'
}

receive() { # SIGNAL: forward it, now or as soon as there is a child
  signals=$((signals + 1)) pending=$1
  [ -z "$child" ] || deliver
}
trap 'warned=yes; receive USR1' USR1
trap 'ended=yes; receive TERM; rescue' TERM
trap 'capped=yes warned=yes; receive USR1' USR2

supervise() { # COMMAND...: run it and return its exit code, even if signals arrive meanwhile
  local code seen
  "$@" &
  child=$!
  [ -z "$pending" ] || deliver
  while
    seen=$signals
    wait "$child"
    code=$?
    [ "$seen" != "$signals" ]
  do :; done
  child=
  return "$code"
}

check_nodes() { # sets $bad to the nodes that cannot train, and $shared where the fault is common
  local out=$submission/preflight${seed:+-$seed}.txt all named silent words
  supervise timeout --kill-after=10 300 srun "${srun[@]}" --chdir="$submission/code" \
    --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --output=all --error=all \
    "${check[@]}" "$run" "$gpus" "$min_free_gb" >"$out" 2>&1
  [ "$warned$ended" = nono ] || return # it was interrupted, and who has not answered yet may be well
  all=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sort)
  if words=$(grep -m 1 '^wrong ' "$out"); then
    bad=$all shared=yes why=${words#wrong *: }
    return
  fi
  named=$(sed -n -e 's/^bad \([^ :]*\):.*/\1/p' \
    -e 's/.*Task launch.* failed on node \([^ :]*\):.*/\1/p' "$out" | sort -u)
  silent=$(sed -n 's/^\(ok\|bad\) \([^ :]*\).*/\2/p' "$out" | sort | comm -23 <(echo "$all") -)
  bad=${named:-$silent}
  [ -n "$bad" ] || return
  words=$(grep -m 1 '^bad ' "$out" || grep -m 1 -v -e '^ok ' -e '^\[W' "$out" || echo no answer)
  why="bad node $(paste -s -d, <<<"$bad"): ${words#bad *: }"
  if [ "$bad" = "$all" ] && { [ "$bad" != "$named" ] || [ "$SLURM_NNODES" -gt 1 ]; }; then
    shared=yes # not the fault of one node, so no node is excluded
  fi
  bad=$(paste -s -d, <<<"$bad")
}

exclude_bad_nodes() { # SLURM accepts this only while the requeued job is not running
  local before
  before=$(scontrol -o show job "$job" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
  scontrol update jobid="$job" ExcNodeList="${before:+$before,}$bad"
}

requeue() {
  local words
  if [ "$ended" = yes ]; then
    verdict=ended why='ended by SLURM before it was requeued'
    return
  fi
  trap '' TERM USR1 # requeueing ends this shell as well
  if ! words=$(scontrol requeue "$job" 2>&1); then
    verdict=final why+="; SLURM did not requeue it: $words"
    return
  fi
  [ -z "$bad" ] || [ "$shared" = yes ] || exclude_bad_nodes
}

find_module() { # only a login shell defines `module`, and a batch shell is not one
  local file
  for file in /etc/profile.d/*mod*.sh "${MODULESHOME:-/usr/share/modules}/init/bash" \
    "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash"; do
    [ "$(type -t module)" = '' ] || return
    # shellcheck disable=SC1090 # a file of the site
    [ ! -r "$file" ] || . "$file"
  done
}

must() { # LINE: run it in this shell; if it fails, the job ends
  step=$1
  eval "$1" || exit 1
}

may() { # LINE: run it in this shell; if it fails, the job continues
  eval "$1" || say "$1 failed on $node"
}

leave_set_up() { # on exit during set-up, by `must` or by the line itself
  trap - EXIT
  code=1 verdict=final why="$step failed on $node"
  [ "$rescued" = no ] || exit "$code"
  if [ "$ended" = yes ]; then
    verdict=ended why=$(ended_by_slurm)
  fi
  finish
}

attempt() { # sets $code
  code=75
  [ "$warned$ended" = nono ] || return
  if [ "$preflight" = yes ]; then
    check_nodes
  fi
  [ "$warned$ended" = nono ] || return
  if [ -n "$bad" ]; then
    code=69
    return
  fi
  logged=$(wc -c 2>/dev/null <"$log")
  supervise srun --nodes="$SLURM_NNODES" --ntasks=$((SLURM_NNODES * ranks)) \
    --ntasks-per-node="$ranks" "${srun[@]}" "${train[@]}"
  code=$?
  [ "$code" != 0 ] || code=70
}

judge() { # sets $verdict (done, requeue, left, ended, final) and $why from $code
  [ "$code" != 75 ] || ! was_preempted || preempted=yes
  close_account
  if finished; then
    verdict='done' why='finished' code=0
  elif [ "$code" = 75 ] && stop_requested; then
    verdict=final why='stopped on request'
  elif [ "$ended" = yes ]; then
    verdict=ended why=$(ended_by_slurm)
  elif [ "$capped" = yes ]; then
    verdict=final why=$gpu_hours_used
  elif [ "$warned" = yes ]; then
    verdict=requeue why='the time limit'
  elif [ "$preempted" = yes ]; then
    verdict=requeue why='preempted'
  elif [ "$code" = 75 ]; then
    verdict=final why='stopped on request'
  elif [ "$code" = 69 ]; then
    verdict=requeue
    [ "$shared" = no ] || verdict=final
  else
    judge_failure
  fi
  if [ "$verdict" = requeue ] && [ "$no_progress" -gt "$budget" ]; then
    verdict=final why+="; $gave_up"
  elif [ "$verdict" = requeue ] && [ -n "$max_requeues" ] && [ "$starts" -ge "$max_requeues" ]; then
    verdict=final why+="; $often_enough"
  fi
  [ "$verdict" != requeue ] || [ "$may_requeue" = yes ] || verdict=left
}

judge_failure() {
  why=$(reason)
  [ "$preflight" = no ] || check_nodes
  verdict=requeue
  case $code in
  2 | 126 | 127) verdict=final ;; # no such command: another start would not find it either
  1) if [ -z "$bad" ] && { [ "$no_progress" -gt 0 ] || refused; }; then verdict=final; fi ;;
  esac
}

reason() { # why the ranks failed, from their records, srun's messages or the log
  local said place
  if [ "$code" = 70 ]; then
    echo 'srun lost the ranks: a node failed, or a rank did not end'
  elif [ "$code" -gt 128 ] && place=$(killed_rank); then
    echo "$place"
  elif said=$(first_failure); then
    echo "$said"
  elif said=$(new_lines | grep -m 1 '^tandem: '); then
    echo "the ranks failed: ${said#tandem: }"
  else
    echo "the ranks ended with code $code"
  fi
}

new_lines() { tail -c "+$((logged + 1))" "$log" 2>/dev/null; }

killed_rank() { # what srun says about the first rank that a signal ended
  local said where how
  said=$(new_lines | grep -v 'Exited with' | grep -m 1 '^srun: error: [^:]*: tasks* [0-9]') || return
  where=$(sed 's/^srun: error: \([^:]*\): task\(s*\) \([^:]*\): .*/rank\2 \3 on \1/' <<<"$said")
  how=${said##*: }
  case $how in
  Killed*) echo "$where was killed; if it ran out of memory, raise --mem" ;;
  'Out Of Memory'*) echo "$where ran out of memory; raise --mem" ;;
  *) echo "$where: $how" ;;
  esac
}

first_failure() { # the error that the first rank to fail wrote beside the attempt's record
  local own form='s/.*"rank": \([0-9]*\), "error": "\(\([^"\\]\|\\.\)*\)".*"host": "\([^"]*\)".*/'
  form+='rank \1 on \4 failed: \2/p'
  own=$(own_attempt) && sed -n "$form" "${own%.json}.failure" 2>/dev/null |
    sed 's/\\n.*//; s/\\\(.\)/\1/g' | grep .
}

is_last() { # of a chain
  [ "$chained" = no ] || [ "$(tail -n 1 "$submission/jobs")" = "$SLURM_JOB_ID" ]
}

is_the_end() { # neither SLURM nor this script will start the run again
  case $verdict in
  done | final) ;;
  left) is_last ;;
  ended) [ "$(requeues)" = "${SLURM_RESTART_COUNT:-0}" ] && is_last ;;
  *) false ;;
  esac
}

announce() {
  local how=failed
  [ "$verdict" != 'done' ] || how=finished
  case $verdict$code in ended* | left* | final75) how=stopped ;; esac
  export TANDEM_RUN=$run TANDEM_END=$how TANDEM_REASON=$why
  at_end
}

finish() { # print, record and carry out the verdict
  [ -z "$timer" ] || kill "$timer" 2>/dev/null
  close_usage "$(date +%s)"
  [ "$verdict" != requeue ] || requeue
  note "$verdict" "$code" "$why"
  say "$verdict: $why (code $code)"
  case $verdict$chained in finalyes | doneyes) write_record "final $why" ;; esac
  ! is_the_end || announce
  exit "$code"
}

mkdir -p "$run/logs"
if ! open_account; then
  say "not started: $why"
  [ "$why" != finished ] || exit 0
  verdict=final code=${code/#0/1}
  [ "$announced" = yes ] || finish
  note final 1 "$why"
  exit 1
fi
note start 0 "${SLURM_RESTART_COUNT:+restart $SLURM_RESTART_COUNT}"
watch_gpu_hours
trap leave_set_up EXIT
set_up
trap - EXIT
set +eu # a set-up command may have set them
attempt
[ "$rescued" = no ] || exit "$code"
if superseded; then
  say "ended (code $code): another attempt of this run has begun"
  exit "$code"
fi
judge
after
finish
