# shellcheck disable=SC2154,SC2034 # the script assigns what is not assigned here, and this uses it
# The supervisor: it starts the ranks, and decides what happens when they end. The job's script
# sources it, from the copy in the submission, which never changes.
#
# It is bash, not Python, so that it works where Python exists only inside a container. It decides
# by the run's own records, the ranks' exit code, and the signals sent to the batch shell. A run ends
# for good on proof only; whatever is unknown leads to a requeue, and the limits on requeues (without
# progress, and in all) bound that.
#
# Proof that nobody should start it again:
# - The record of this start's attempt says that the run is finished, whatever the exit code. Stages
#   other than training leave a file in the account when they end.
# - `tandem stop` left a file in the run folder. A copy that SLURM requeues by itself does not start.
# - A set-up command failed: no rank starts in an incomplete environment.
# - At a first start, the node check says that all nodes lack the same thing.
# - Exit code 1 with a message of a rank, no new step, and no node at fault: a user must change
#   something. Steps do not count where this job was refused because another job is running the run.
# - A limit on starts or GPU-hours is reached. This shell sends itself USR2 when the GPU-hours are
#   spent; the ranks save first.
#
# What happens otherwise:
# - Before the time limit SLURM sends USR1. The script forwards it to the ranks, which save and
#   report a stop (code 75 below) in a file; then the script requeues the job.
# - TERM means that SLURM itself ends the job. The cause is `scancel`, which is final; an immediate
#   preemption, after which SLURM requeues by itself; or a time limit reached before the ranks saved.
# - In a preemption with a grace time SLURM signals only the step: the ranks, which save and stop,
#   or the node check. The script finds the preemption in SLURM's record of the job, and requeues it.
# - Exit code 0 without the record of a finished run is counted as 70. srun also returns 0 for ranks
#   that it has lost, for example when a node dies or a job is cancelled.
# - `at_end` is called once per run: not at a requeue, and not between the jobs of a chain.

node=${SLURMD_NODENAME:-$HOSTNAME}
code=0 verdict='' why='' step='' logged=0 bad='' shared=no wrong=no
signals=0 pending='' child='' warned=no ended=no rescued=no preempted=no capped=no
plural=$([ "$budget" = 1 ] || echo s)
on_request='stopped on request'
gave_up="gave up after $budget requeue$plural without a new step; fix the cause, then \`tandem submit\` again"
gpu_hours_used="max_gpu_hours: its $max_gpu_hours GPU-hours are spent"
often_enough="max_requeues: it has been requeued $max_requeues times, which is the limit"

say() { printf 'tandem: %s\n' "$*"; }

note() { # EVENT CODE REASON: one line for `tandem status`
  local form='{"time": %s, "job": "%s", "restart": %d, "nodes": "%s", '
  form+='"event": "%s", "code": %d, "reason": "%s"}\n'
  printf "$form" "$(date +%s)" "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" \
    "$SLURM_JOB_NODELIST" "$1" "$2" "$(printf %s "$3" | tr '"\\[:cntrl:]' "'/ ")" \
    >>"$run/slurm.jsonl"
} 2>/dev/null

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

finished() { # [STAGE]: whether it has come to its end, or all of them have
  local stage own
  for stage in ${1:-${stages[*]}}; do
    if [ "$stage" != train ]; then
      [ -e "$account/$stage" ] || return # the command wrote it last
    else
      own=$(own_attempt) && grep -q '"finished": true' "$own" || return
    fi
  done
}

deliver() {
  kill -s "$pending" "$child" 2>/dev/null
  pending=
}

ended_by_slurm() { # the reason, as far as it is known
  case $(fact Restarts)$may_requeue in
  "${SLURM_RESTART_COUNT:-0}yes") echo cancelled ;;
  "$((${SLURM_RESTART_COUNT:-0} + 1))"*) echo 'preempted, or a node failed: SLURM requeues it' ;;
  *) echo 'ended by SLURM: cancelled, preempted, or a node failed' ;;
  esac
}

rescue() { # at the time limit SLURM kills this shell with the ranks, so it requeues at once
  [ "$may_requeue" = yes ] && timed_out && give_back || return
  rescued=yes
  note requeue 0 'the time limit, before the ranks had saved'
}

receive() { # SIGNAL: forward it, now or as soon as there is a child
  signals=$((signals + 1)) pending=$1
  [ -z "$child" ] || deliver
}
trap 'warned=yes; receive USR1' USR1
trap 'ended=yes patience=20; receive TERM; rescue' TERM # it is killed half a minute later
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

requeue() {
  if [ "$ended" = yes ]; then
    verdict=ended why='ended by SLURM before it was requeued'
    return
  fi
  trap '' TERM USR1 # requeueing ends this shell as well
  if ! give_back; then
    verdict=final code=${code/#75/1} why+="; SLURM did not requeue it: $answer"
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
  step=$1 logged=$(wc -c 2>/dev/null <"$log")
  eval "$1" || exit 1
  case $1 in
  *'||'*) ;; # it may fail
  *module*) ! new_lines | grep ':ERROR:[0-9]*:' >/dev/null || exit 1 ;; # Modules 3 answers 0 to all
  esac
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
  local stage
  code=75
  [ "$warned$ended" = nono ] || return
  choose_port
  if [ "$preflight" = yes ]; then
    check_nodes
  fi
  [ "$warned$ended$preempted" = nonono ] || return
  if [ -n "$bad" ]; then
    code=69
    return
  fi
  for stage in "${stages[@]}"; do
    ! finished "$stage" || continue
    code=75
    [ "$warned$ended" = nono ] && ! stop_requested || return
    logged=$(wc -c 2>/dev/null <"$log")
    launch "$stage"
    code=$?
    if [ "$code" = 0 ] && ! finished "$stage"; then
      code=70
      [ ! -e "$account/$stage.stopped" ] || code=75 # a step that exits 75 has FAILED, for SLURM
    fi
    [ "$code" = 0 ] || return
  done
}

launch() { # STAGE: one process for each rank; an evaluation is one, which starts what it needs
  local words="$1[@]"
  local tasks=(--ntasks=$((SLURM_NNODES * ranks)) --ntasks-per-node="$ranks")
  if [ "$1" = evaluate ]; then
    # srun warns that a step may never run if its option exceeds the variable.
    local -x SRUN_CPUS_PER_TASK=$((ranks * ${SLURM_CPUS_PER_TASK:-1}))
    tasks=(--ntasks=1 --ntasks-per-node=1 --cpus-per-task="$SRUN_CPUS_PER_TASK")
  fi
  export TANDEM_OUTCOME=$account/$1
  rm -f "$TANDEM_OUTCOME.stopped"
  supervise srun --nodes="$SLURM_NNODES" "${tasks[@]}" "${srun[@]}" "${!words}"
}

judge() { # sets $verdict (done, requeue, left, ended, final) and $why from $code
  if [ "$ended$warned" = nono ] && ! finished && ! stop_requested && was_preempted; then
    preempted=yes
  fi
  close_account
  if finished; then
    verdict='done' why=finished code=0
  elif [ "$code" = 75 ] && stop_requested; then
    verdict=final why=$on_request
  elif [ "$ended" = yes ]; then
    verdict=ended why=$(ended_by_slurm)
  elif [ "$capped" = yes ]; then
    verdict=final why=$gpu_hours_used
  elif [ "$warned" = yes ]; then
    verdict=requeue why='the time limit'
  elif [ "$preempted" = yes ]; then
    verdict=requeue why=preempted
  elif [ "$code" = 75 ]; then
    verdict=requeue why='it saved and ended, though neither SLURM nor `tandem stop` asked for it'
  elif [ "$code" = 69 ]; then
    verdict=requeue
    [ "$wrong" = no ] || [ -n "$SLURM_RESTART_COUNT" ] || verdict=final
  else
    judge_failure
  fi
  limit_requeues
}

limit_requeues() {
  if [ "$verdict" = requeue ] && [ "$no_progress" -gt "$budget" ]; then
    verdict=final code=${code/#75/1} why+="; $gave_up"
  elif [ "$verdict" = requeue ] && [ -n "$max_requeues" ] && [ "$starts" -ge "$max_requeues" ]; then
    verdict=final why+="; $often_enough"
  fi
  [ "$verdict" != requeue ] || [ "$may_requeue" = yes ] || verdict=left
}

judge_failure() {
  why=$(reason)
  [ "$preflight" = no ] || check_nodes
  verdict=requeue
  if [ "$code" = 1 ] && [ -z "$bad" ] && rank_said >/dev/null; then
    if [ "$no_progress" -gt 0 ] || refused; then verdict=final; fi
  fi
}

reason() { # why the ranks failed, from their records, srun's messages or the log
  if [ "$code" = 70 ]; then
    echo 'srun lost the ranks: a node failed, or a rank did not end'
  else
    killed_rank || rank_said || echo "the ranks ended with code $code"
  fi
}

rank_said() { # the error that a rank reported
  local said
  first_failure && return
  said=$(new_lines | sed -E 's/^ *[0-9]+: //' | grep -m 1 '^tandem: ') && echo "the ranks failed: ${said#tandem: }"
}

new_lines() { tail -c "+$((logged + 1))" "$log" 2>/dev/null; } # with --label each begins with a rank

killed_rank() { # what srun says about the first rank that a signal ended
  local said where how
  if new_lines | grep -iE 'oom[-_ ]kill(ed)?( event|\b)|: Out Of Memory' >/dev/null; then
    where=$(rank_of "$(new_lines | grep -m 1 -E '^srun: error: .*: (Out Of Memory|Killed)')")
    echo "${where:-a rank} ran out of memory; raise --mem"
    return
  fi
  said=$(new_lines | grep -v 'Exited with' | grep -m 1 '^srun: error: [^:]*: tasks* [0-9]') || return
  where=$(rank_of "$said")
  how=${said##*: }
  case $how in
  Killed*) echo "$where was killed; if it ran out of memory, raise --mem" ;;
  *) echo "$where: $how" ;;
  esac
}

rank_of() { # LINE of srun: which rank it is about
  sed -n 's/^srun: error: \([^:]*\): task\(s*\) \([^:]*\): .*/rank\2 \3 on \1/p' <<<"$1"
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
  ended) [ "$(fact Restarts)" = "${SLURM_RESTART_COUNT:-0}" ] && is_last ;;
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
  note "$verdict" "$code" "$why" || say "$node cannot write to $run/slurm.jsonl"
  say "$verdict: $why (code $code)"
  case $verdict$chained in finalyes | doneyes) write_record "final $why" ;; esac
  ! is_the_end || announce
  case $verdict$code in # it did as it was told, and has not FAILED for SLURM
  left75 | requeue75) code=0 ;;
  final75) end_as_cancelled ;;
  esac
  exit "$code"
}

end_as_cancelled() { # nobody starts it again, and the run is not COMPLETED either
  trap '' TERM
  timeout --kill-after=5 30 scancel "$job"
}

refuse_start() { # $verdict is what open_account decided
  say "not started: $why"
  [ "$why" != finished ] || exit 0
  [ "$verdict" != known ] || exit 1 # the job that ended the run has noted it
  code=${code/#0/1}
  limit_requeues
  finish
}

here=${BASH_SOURCE[0]%/*}
# shellcheck disable=SC1090,SC1091 # beside this file
for part in controller accounts nodes; do . "$here/$part.sh"; done
trust_own_restarts
open_account
[ -z "$verdict" ] || refuse_start
note start 0 "${SLURM_RESTART_COUNT:+restart $SLURM_RESTART_COUNT}"
watch_gpu_hours
directory=$PWD
trap leave_set_up EXIT
set_up
trap - EXIT
set +eu # a set-up command may have set them
cd "$directory" || say "$node cannot enter $directory" # which one may have left
attempt
[ "$rescued" = no ] || exit "$code"
if superseded; then
  say "ended (code $code): another attempt of this run has begun"
  exit "$code"
fi
judge
after
finish
