# shellcheck disable=SC2154,SC2034 # other parts assign what is not assigned here, or use it
# Questions to SLURM's controller. It may be down or slow for minutes, which is no reason to end a
# run: a question is repeated until it is answered, or until $patience seconds have passed.

patience=3600
# What scontrol says of itself and of the network; anything else is the controller's own answer.
no_answer='unable to contact|timed out|timeout|connection|socket|communication|zero bytes|unreachable'
no_answer+='|resource temporarily|backup|standby|not responding|try again|authentication'

ask() { # ARGUMENT...: sets $answer to what scontrol prints; fails if refused, or without an answer
  local end=$((SECONDS + patience)) pause=1
  until answer=$(timeout --kill-after=5 30 scontrol "$@" 2>&1); do
    [ -z "$answer" ] || grep -qiE "$no_answer" <<<"$answer" || return 1
    [ "$SECONDS" -lt "$end" ] || return 2
    sleep "$pause" &
    wait "$!"
    pause=$((pause < 15 ? 2 * pause : 15))
  done
}

fact() { # NAME: a fact about this job, such as Restarts; empty if it is unknown
  ask -o show job "$job" || return
  sed -n "s/^\(.* \)\{0,1\}$1=\([^ ]*\).*/\2/p" <<<"$answer" | head -n 1
}

timed_out() { [ "$(fact Reason)" = TimeLimit ]; }

was_preempted() { fact PreemptTime | grep -q '^[0-9]'; }

requeued_by_now() { # SLURM's count of requeues is one higher as soon as it has requeued this job
  local restarts
  restarts=$(fact Restarts)
  [ -n "$restarts" ] && [ "$restarts" -gt "${SLURM_RESTART_COUNT:-0}" ]
}

give_back() { # requeue the job; repeated until SLURM has done it; sets $answer where it refuses
  local refusal
  while ! ask requeue "$job"; do
    refusal=$answer
    requeued_by_now && return # its answer was lost
    answer=$refusal
    grep -qiE "$no_answer" <<<"$refusal" || return
  done
}

trust_own_restarts() { # a shell that submitted this job may have handed on the count of another
  local restarts
  [ -n "$SLURM_RESTART_COUNT" ] || return
  restarts=$(fact Restarts)
  [ "$restarts" != 0 ] || unset SLURM_RESTART_COUNT
  [ "${restarts:-0}" = 0 ] || export SLURM_RESTART_COUNT=$restarts
}
