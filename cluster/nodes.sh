# shellcheck disable=SC2154,SC2034 # other parts assign what is not assigned here, or use it
# The check of the nodes, and which of them the next start does without.
#
# `tandem preflight` prints a line for each node: `ok NODE`, `bad NODE: REASON` (its own fault),
# `cut NODE: REASON` (it cannot communicate, and another node may be to blame), or
# `wrong NODE: REASON` (the same on every node). A node that prints none is silent.

day=86400 # seconds for which a bad node is left out

check_nodes() { # sets $bad to the nodes at fault, and $shared where the fault is common to all
  local out all words
  out=$(mktemp) || return
  supervise timeout --kill-after=10 150 srun "${check_srun[@]}" \
    --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    "${check[@]}" "$run" "$gpus" "$min_free_gb" >"$out" 2>&1
  [ "$warned$ended" = nono ] || return # it was interrupted, and who has not answered yet may be well
  all=$(hosts "$SLURM_JOB_NODELIST")
  if words=$(grep -m 1 '^wrong ' "$out"); then
    bad=$(join <<<"$all") shared=yes wrong=yes why=${words#wrong *: }
  elif [ "$(answered ok)" != "$all" ] && was_preempted; then
    preempted=yes # SLURM ended the check itself, and one node before the other
  else
    blame
  fi
  grep -v -e '^ok ' -e '^\[W' "$out"
  rm -f "$out"
}

answered() { sed -n -E "s/^($1) ([^ :]*).*/\2/p" "$out" | sort -u; } # WORD: the nodes that said it

hosts() { # LIST: the names in a list such as n[1-3], a line each
  ask show hostnames "$1" && sort <<<"$answer"
}

join() { paste -s -d,; }

blame() { # by $all and the answers in $out
  local guilty unreachable
  unreachable=$(answered cut)
  guilty=$({
    answered bad
    sed -n 's/.*Task launch.* failed on node \([^ :]*\):.*/\1/p' "$out"
  } | sort -u)
  guilty=${guilty:-$(comm -23 <(echo "$all") <(answered 'ok|bad|cut'))}
  [ -n "$guilty$unreachable" ] || return
  if [ "$guilty" = "$all" ] && ! is_one_node; then
    guilty='' # what all of them have is the fault of none
  elif [ -z "$guilty" ]; then
    guilty=$(cut_off)
  fi
  words=$(grep -m 1 '^bad ' "$out" || grep -m 1 '^cut ' "$out" ||
    grep -m 1 -v -e '^ok ' -e '^\[W' "$out" || echo no answer)
  bad=$(join <<<"${guilty:-$all}")
  why="bad node $bad: ${words#* *: }"
  if [ -z "$guilty" ]; then
    shared=yes why="every node: ${words#* *: }" # so none is left out
  fi
}

is_one_node() { [ "$SLURM_NNODES" = 1 ] && [ -n "$(answered bad)" ]; }

cut_off() { # who is to blame that nodes cannot communicate: whoever most of the others miss
  local missed ok count
  missed=$unreachable ok=$(answered ok)
  count=$(grep -c . <<<"$missed")
  [ "$count" -gt 0 ] && [ -n "$ok" ] || return
  if [ "$SLURM_NNODES" = 2 ]; then
    echo "$all" # either of the two
  elif [ $((2 * count)) -lt "$SLURM_NNODES" ]; then
    echo "$missed"
  elif [ "$(grep -c . <<<"$ok")" = 1 ]; then
    echo "$ok" # the first, which holds the meeting point
  fi
}

exclude_bad_nodes() { # SLURM accepts this only while the requeued job is not running
  local now before theirs ours list
  now=$(date +%s)
  before=$(fact ExcNodeList)
  theirs=$(comm -23 <(hosts "${before/(null)/}") <(awk '{ print $2 }' "$account/excluded" | sort))
  ours=$({
    awk -v oldest=$((now - day)) '$1 >= oldest' "$account/excluded"
    tr , '\n' <<<"$bad" | sed "s/^/$now /"
  })
  while # as many of the newest as leave enough nodes for the job
    list=$({
      echo "$theirs"
      awk '{ print $2 }' <<<"$ours"
    } | grep . | sort -u | join)
    [ -n "$ours" ] && never_granted "$list"
  do ours=$(tail -n +2 <<<"$ours"); done
  [ -n "$ours" ] || say 'no node is left out, since too few would remain'
  printf '%s\n' "$ours" >"$account/excluded"
  ask update jobid="$job" ExcNodeList="$list"
} 2>/dev/null

never_granted() { # LIST: whether the job could not run without these nodes
  sbatch --test-only --exclude="$1" "$submission/job.sbatch" 2>&1 |
    grep -qE 'configuration is not available|More processors requested|invalid'
}

choose_port() { # exports TANDEM_PORT, where the ranks meet: one that nothing listens on here
  local attempt
  for attempt in {0..99}; do # the first differs between jobs on a node, and between their restarts
    TANDEM_PORT=$((16000 + (SLURM_JOB_ID * 101 + ${SLURM_RESTART_COUNT:-0} + attempt * 17) % 16000))
    grep -qsE ":$(printf %04X "$TANDEM_PORT") [0-9A-F:]+ 0A " /proc/net/tcp /proc/net/tcp6 || break
  done
  export TANDEM_PORT
}
