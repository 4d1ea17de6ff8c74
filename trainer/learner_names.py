"""The names of learners and of the parts of a step, and the seeds derived from names.

Every learner's initial weights and every step's dropout have seeds of their own. A student is
therefore the same bit for bit whichever learners train beside it, and a resumed job has no
generator state to restore.
"""

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of `parts`."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


# The parts of a learner's step, as metrics name them.
FORWARD, BACKWARD, STEP, COMMUNICATION = ("forward", "backward", "step", "communication")

TEACHER = "teacher"
OWN = "own"  # a source: the learner's own last head
MEAN = "mean"  # a source: the mean of what the teachers predict


def student_key(name: str) -> str:
    """The full name of the student with this key in YAML."""
    return f"students/{name}"


def plain_name(name: str) -> str:
    """``students/tiny`` as tiny; the name of a teacher as it is."""
    return name.removeprefix("students/")


def teacher_key(name: str) -> str:
    """The name, among learners and sources, of what a term's ``teacher`` is in YAML."""
    return name if name in (TEACHER, MEAN) else f"teachers/{name}"


def learner_key(name: str) -> str:
    """The full name of the job's own teacher, or of the student with this key in YAML."""
    return name if name == TEACHER else student_key(name)


def is_teacher(name: str) -> bool:
    """Whether the learner of this name teaches: the job's teacher, or one of its further ones."""
    return name == TEACHER or name.startswith("teachers/")


def is_student(name: str) -> bool:
    """Whether the learner of this name is a student."""
    return name.startswith("students/")


def section_of(name: str) -> str:
    """The section of the YAML that describes a learner."""
    return name.replace("/", ".")
