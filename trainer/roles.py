"""Rules between sections of a job: how teachers, students and their data must fit together."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from configs.section import Refusal, within
from data_pipeline import DEFAULT_VIEW, MASKED, DataConfig
from data_pipeline.packing.kinds import PACKINGS
from model import Ability, ModelConfig
from trainer.denominators import ATTENDED
from trainer.learner_config import SEPARATE, LearnerConfig
from trainer.learner_life import BudgetConfig, StartConfig, layers_of_the_moment
from trainer.learner_names import MEAN, TEACHER, is_student, is_teacher, plain_name, section_of
from trainer.objectives.task import HeadTermConfig, TaskConfig
from trainer.objectives.term import TermConfig
from trainer.objectives.terms.attention import MatrixTermConfig
from trainer.objectives.terms.predictions import DivergenceConfig, unshared_vocabulary
from trainer.scoring.scores import OVER_UNIGRAM, UNIGRAM

Named = Mapping[str, LearnerConfig]
_FOR_TEACHERS = ("frozen", "masked_only", "stacking")


def conflicts_of_roles(teacher: LearnerConfig, others: Named, students: Named) -> Iterator[Refusal]:
    """Settings that are only for a teacher or only for a student, and misfits between them.

    `others` are further teachers.
    """
    for name, student in students.items():
        yield from within(f"students.{name}", _conflicts_of_student(name, student, teacher))
        yield from within(f"students.{name}.objective", _conflicts_of_lead(student, teacher))
    yield from within("teacher", _conflicts_of_teacher(teacher))
    for name, other in others.items():
        yield from within(f"teachers.{name}", _conflicts_of_other(name, other))
    if teacher.frozen and not students:
        yield "students", "a frozen teacher needs at least one"
    if dataclasses.replace(teacher.budget, patience=None) != BudgetConfig() and not students:
        yield "teacher.budget", "is for a teacher that teaches on; without students see steps"
    if teacher.average is not None and teacher.budget != BudgetConfig() and students:
        why = "a teacher that ends before its students keeps none; remove it, or teacher.budget"
        yield "teacher.average", why
    yield from within("teacher.objective.from_student", _conflicts_of_peer(teacher, students))


def conflicts_with_data(everyone: Named, data: DataConfig) -> Iterator[Refusal]:
    """Objectives that need what the data or a teacher lack, including those of late students."""
    packings = [packing for _, packing in data.lengths_and_packings()]
    masked = data.highest_masking_rate > 0
    if data.has_examples:  # a task may have tokens to predict, as masked text has
        masked = any(task.head == MASKED for task in _tasks_of(everyone))
    turning = any(learner.model.is_rotary and not learner.frozen for learner in everyone.values())
    for number, phase in enumerate(data.phases):
        if phase.rope_theta and not turning:
            why = "no model that is trained has rotary positions; remove it"
            yield f"data.phases[{number}].rope_theta", why
    teachers = {name: config for name, config in everyone.items() if is_teacher(name)}
    models = {name: config.model for name, config in teachers.items()}
    yield from _conflicts_with_examples(everyone, data)
    yield from _conflicts_of_tokenizers(everyone, data)
    yield from _conflicts_of_views(everyone)
    yield from _conflicts_of_generators(everyone, data)
    yield from _conflicts_of_single_texts(everyone)
    for learner, config in everyone.items():
        objective, key = config.objective, f"{section_of(learner)}.objective"
        yield from within(key, objective.conflicts_with_data(packings, masked))
        for name, teacher in teachers.items():
            if teacher.masked_only:
                as_read = {name, MEAN}, learner == name
                yield from within(key, objective.conflicts_with_masked_only(name, *as_read))
            if teacher.stored is not None:
                yield from within(key, objective.conflicts_with_stored(name, teacher.stored))
        each_layer = config.progressive is not None
        yield from within(key, objective.misfits(config.model, models, each_layer))
        packed = [kind for kind in packings if PACKINGS[kind].separates_documents]
        if packed and config.stored is None and (why := config.model.cannot(Ability.DOCUMENTS)):
            yield f"{section_of(learner)}.model.kind", f"{why}, as data.packing: {packed[0]} needs"
        if Ability.GENERATE in config.model.abilities and not data.has_examples:
            why = f"{config.model.kind} reads pairs of texts; name data.train, and a translation"
            yield f"{section_of(learner)}.model.kind", why
    yield from _unread_teachers(everyone)
    if data.has_next_tokens:
        yield from _conflicts_with_next_tokens(everyone)
    if everyone[TEACHER].stored is not None and data.has_examples and not masked:
        why = f"is for predicted tokens; the examples in {_examples_in(data)} have none"
        yield "teacher.stored", why


def _conflicts_with_next_tokens(everyone: Named) -> Iterator[Refusal]:
    """Models that see behind a position, and terms that have no meaning where none does."""
    phase = "data.masking.unit: next_token"
    for learner, config in everyone.items():
        section = section_of(learner)
        if config.generator is not None:
            yield f"{section}.generator", f"replaces masked tokens, and {phase} masks none"
        elif config.stored is None and (why := config.model.cannot(Ability.CAUSAL)):
            yield f"{section}.model.kind", f"{why}, as {phase} needs"
        for name, term in config.objective.terms().items():
            if isinstance(term, MatrixTermConfig):
                why = f"compares attention in both directions, and {phase} has one; remove it"
                yield f"{section}.objective.{config.objective.key_of(name)}", why


def _tasks_of(learners: Named) -> list[TaskConfig]:
    """The tasks of all of these learners."""
    terms = (learner.objective.task_terms() for learner in learners.values())
    return [task for of_learner in terms for task in of_learner.values()]


def conflicts_about_metrics(
    columns: Iterable[str], students: Named, primary: str | None
) -> Iterator[Refusal]:
    """Metrics that are none of the teacher's `columns`."""
    known = [*columns]
    if not known:
        why = "has no head that could be scored; add a task, or mlm, to an objective"
        yield "teacher", f"{why}; a frozen teacher needs a masked-LM head or a classifier"
    if primary is not None and primary not in known:
        yield "evaluation.metric", f"must be one of {', '.join(known)}, not {primary}"
    known += [f"{name}{OVER_UNIGRAM}" for name in known if name in UNIGRAM]
    for name, student in students.items():
        threshold = student.start.teacher
        if threshold and threshold.metric is not None and threshold.metric not in known:
            why = f"must be one of {', '.join(known)}, not {threshold.metric}"
            yield f"students.{name}.start.teacher.metric", why


def _conflicts_with_examples(learners: Named, data: DataConfig) -> Iterator[Refusal]:
    """Tasks without examples, and terms on text in a job that reads a task's examples."""
    tasks: dict[str, tuple[str, TaskConfig]] = {}
    for learner, config in learners.items():
        heads = {task.head for task in config.objective.task_terms().values()}
        for name, term in config.objective.terms().items():
            key = f"{section_of(learner)}.objective.{config.objective.key_of(name)}"
            if isinstance(term, TaskConfig):
                first, other = tasks.setdefault(name, (key, term))
                if dataclasses.replace(term, weight=other.weight, module=other.module) != other:
                    yield key, f"must have the settings of {first}, except its weight and module"
            elif isinstance(term, HeadTermConfig) and term.head not in heads:
                section = key.removesuffix(f"_{term.head}")
                yield section, "needs the task beside it, whose weight may be 0"
            elif term.head in heads:
                continue  # about the head of a task that stands beside it
            elif data.has_examples and (term.reads_masked or term.head is not None):
                yield key, f"is about text, but the job reads the examples in {_examples_in(data)}"
        if data.tasks and heads and heads != data.tasks.keys():
            yield (
                f"{section_of(learner)}.objective.tasks",
                f"must be those of data.tasks: {', '.join(data.tasks)}",
            )
    if tasks and not data.has_examples:
        first, _ = next(iter(tasks.values()))
        yield "data.train", f"must name the examples of {first}"
    if data.train and len(tasks) != 1:
        named = " and ".join(tasks) or "none"
        yield "data.train", f"one task must read it, a term of an objective; there is: {named}"
    if data.tasks and not tasks:
        yield "data.tasks", "no learner has these tasks in objective.tasks"


def _examples_in(data: DataConfig) -> str:
    return data.train or ", ".join(task.train for task in data.tasks.values())


def _conflicts_of_views(learners: Named) -> Iterator[Refusal]:
    """Views that the data do not have, and states that are compared across views."""
    tasks = _tasks_of(learners)
    shared = [name for task in tasks[:1] for name in task.views]
    known = [DEFAULT_VIEW, *(name for name in shared if all(name in task.views for task in tasks))]
    for learner, config in learners.items():
        if config.view not in known:
            why = f"the data have no view {config.view!r}; there are: {', '.join(known)}"
            yield f"{section_of(learner)}.view", why
            continue
        for task in tasks[:1]:
            if reason := task.unreadable(config.view, config.model):
                yield f"{section_of(learner)}.view", reason
        for name, term in config.objective.terms().items():
            read = _sources_of(term, learners).values()
            views = {other.view for other in read}
            generators = {other.generator_name for other in read}
            key = f"{section_of(learner)}.objective.{config.objective.key_of(name)}"
            if term.reads_states and views - {config.view}:
                yield key, "compares states, so that its teacher must have the same view"
            if term.reads_states and generators - {config.generator_name}:
                yield key, "compares states, so that its teacher must have the same generator"
            for view in sorted(views):
                if not all(task.aligns(config.view, view) for task in tasks):
                    why = f"view {view} of its teacher has other labels than view {config.view}"
                    yield key, f"{why}; give one of them another view"


def _conflicts_of_generators(learners: Named, data: DataConfig) -> Iterator[Refusal]:
    """Generators that are missing, do not fit, or do not run before those who read them."""
    for learner, config in learners.items():
        if config.generator is not None:
            key = f"{section_of(learner)}.generator"
            yield from within(key, _misfits_of_generator(config, learners))
            if data.has_examples:
                yield key, f"is for text, but the job reads the examples in {_examples_in(data)}"


def _misfits_of_generator(config: LearnerConfig, learners: Named) -> Iterator[Refusal]:
    name = config.generator_name
    if name is None or name not in learners:
        names = [plain_name(other) for other in learners if "teachers/" not in other]
        yield "", f"no learner {config.generator!r}; there are: {', '.join(names)}"
        return
    generator, section = learners[name], section_of(name)
    if generator.generator is not None:
        yield "", f"must be a learner that reads the masked text, and {section} has a generator"
    elif not generator.architecture.mlm_head:
        yield "", f"samples tokens, and {section} predicts none; give its objective mlm"
    elif config.tokenizer is not None or generator.tokenizer is not None:
        yield "", "is for learners of the job's tokenizer; remove it, or their tokenizer"
    elif generator.stored is not None and generator.stored.is_cut:
        yield "", f"samples every token; set {section}.stored.top_k to null, or its samples"
    elif generator.model.vocab_size != config.model.vocab_size:
        yield "", unshared_vocabulary(config.model.vocab_size, generator.model.vocab_size)
    elif (
        config.embedding_sharing != SEPARATE and generator.model.word_size != config.model.word_size
    ):
        sizes = f"{config.model.word_size} and {generator.model.word_size}"
        yield "", f"shares its word vectors, and their sizes are {sizes}; set both alike"
    if is_student(name):  # it runs before the teacher, in every step
        for key in generator.changed("start", "budget"):
            yield "", f"is read in all steps; remove {section}.{key}"
        if generator.objective.teacher_terms():
            yield "", f"runs before the teacher; remove the terms of {section} about a teacher"


def _conflicts_of_single_texts(learners: Named) -> Iterator[Refusal]:
    """Models that compare two texts, in learners that do not read two."""
    for learner, config in learners.items():
        tasks = config.objective.task_terms().values()
        reads_two = bool(tasks) and all(len(task.texts_of(config.view)) == 2 for task in tasks)
        if config.model.needs_pairs and config.objective.terms() and not reads_two:
            why = "compares two texts; give its objective a task on whole pairs, as sentence_pair"
            yield f"{section_of(learner)}.model", why


def _conflicts_of_student(
    name: str, student: LearnerConfig, teacher: LearnerConfig
) -> Iterator[Refusal]:
    if name == "teacher":
        yield "", "that name is the teacher's; choose another"
    if not student.objective.terms():
        yield "objective", "name at least one term"
    for key in student.changed(*_FOR_TEACHERS):
        yield key, "is for the teacher; remove it"
    if student.objective.from_student is not None:
        yield "objective.from_student", "is for the teacher; remove it"
    if student.init.teacher_layers is not None:
        copied = _conflicts_of_copied_layers(student.init.teacher_layers, student, teacher)
        yield from within("init.teacher_layers", copied)
    for key in student.init.changed("teacher_layers", "teacher_embeddings"):
        if teacher.embedding_sharing != SEPARATE:
            why = "copies an embedding, of which the teacher has a part; remove it, or"
            yield f"init.{key}", f"{why} teacher.embedding_sharing"
    if student.init.teacher_embeddings:
        unequal = _unequal(student.model, teacher.model, teacher.model.embedding_keys)
        yield from within("init.teacher_embeddings", unequal)


def _conflicts_of_lead(student: LearnerConfig, teacher: LearnerConfig) -> Iterator[Refusal]:
    """Terms with a `min_lead` of the user's that cannot be measured or has no effect."""
    for name, term in student.objective.terms().items():
        if getattr(term, "min_lead", None) is None or not [*term.changed("min_lead")]:
            continue
        if term.min_lead_over_student is None or teacher.frozen:
            yield f"{name}.min_lead", "is about a teacher that this job trains; remove it"
        elif not student.waits_for(teacher):
            why = "compares losses, so student and teacher need one in common, of the same tokens"
            why = f"{why} (mlm); remove it"
            yield f"{name}.min_lead", why


def _conflicts_of_copied_layers(
    chosen: Sequence[int], student: LearnerConfig, teacher: LearnerConfig
) -> Iterator[Refusal]:
    copy, original = student.model, teacher.model
    if not all(0 <= layer < original.layers for layer in chosen):
        yield "", f"the teacher's layers are 0 to {original.layers - 1}"
    if len(chosen) != copy.layers:
        yield "", f"lists {len(chosen)} for the student's {copy.layers}"
    yield from _unequal(copy, original, original.meaning())
    for depth in _depths_at_start(student.start, teacher):
        layers = layers_of_the_moment(chosen, original.layers, depth)
        if why := teacher.with_layers(depth).model.cannot_copy(layers):
            yield "", why


def _depths_at_start(start: StartConfig, teacher: LearnerConfig) -> list[int]:
    """How many layers the teacher may have when a student joins; stacking lets them grow."""
    is_known = start.teacher is None and start.fraction is None
    growths = [] if is_known else [step for step in teacher.stacking.steps if step > start.step]
    steps = [start.step, *growths]
    return [teacher.stacking.layers_at(step, teacher.model.layers) for step in steps]


def _unequal(student: ModelConfig, teacher: ModelConfig, keys: Iterable[str]) -> Iterator[Refusal]:
    """A refusal for each of `keys` in which a student differs from the teacher it begins as."""
    if student.kind != teacher.kind:
        yield "", f"model.kind is {student.kind}, and the teacher's {teacher.kind}"
        return
    ours, theirs, free = student.meaning(), teacher.meaning(), student.own_keys()
    for key in keys:
        if key not in free and key in ours and ours[key] != theirs.get(key, ours[key]):
            yield "", f"model.{key} is {ours[key]}, and the teacher's {theirs[key]}; set both alike"


def _conflicts_of_other(name: str, teacher: LearnerConfig) -> Iterator[Refusal]:
    """Conflicts of a further teacher that is not a finished model."""
    if name in (TEACHER, MEAN):
        yield "", "a term means something else by that name; choose another"
    if not teacher.frozen:
        yield "frozen", "must be true: only `teacher` is trained"
    if teacher.stored is not None:
        yield "stored", "only the predictions of `teacher` can be stored; remove it"
    yield from _conflicts_of_teacher(teacher)


def _unread_teachers(learners: Named) -> Iterator[Refusal]:
    """Further teachers that no term reads."""
    read = {source for learner in learners.values() for source in learner.objective.sources}
    for learner in learners:
        if is_teacher(learner) and learner != TEACHER and read.isdisjoint((learner, MEAN)):
            name = learner.removeprefix("teachers/")
            why = f"no learner reads it; a student's term reads it with teacher: {name}, or {MEAN}"
            yield section_of(learner), why


def _conflicts_of_teacher(teacher: LearnerConfig) -> Iterator[Refusal]:
    if not teacher.frozen and not teacher.objective.terms():
        yield "objective", "name at least one term"
    for term in teacher.objective.teacher_terms():
        why = "is for students, as no teacher has a teacher; remove it"
        yield f"objective.{teacher.objective.key_of(term)}", why
    if teacher.start != StartConfig():
        yield "start", "is for students; remove it"
    if teacher.budget != BudgetConfig() and teacher.frozen:
        yield "budget", "a frozen teacher has none; remove it, or frozen"
    if teacher.budget != BudgetConfig() and teacher.stacking.steps:
        yield "budget", "is for a teacher of one size; remove it, or stacking"
    if teacher.init.teacher_layers is not None or teacher.init.teacher_embeddings:
        yield "init", "its teacher_... keys are for students"
    if teacher.stacking.steps:
        yield from within("objective", _conflicts_at_first_depth(teacher))


def _conflicts_at_first_depth(teacher: LearnerConfig) -> Iterator[Refusal]:
    """The terms that need more layers than those with which stacking begins."""
    depth = teacher.stacking.layers_at(0, teacher.model.layers)
    model, objective = teacher.model.with_layers(depth), teacher.objective
    unfit = objective.unequippable(model), objective.misfits(model, {TEACHER: model}, False)
    for key, why in chain(*unfit):
        yield key, f"{why}; by stacking.steps the depth at the start is {depth}"


def _conflicts_of_peer(teacher: LearnerConfig, students: Named) -> Iterator[Refusal]:
    """Conflicts of a teacher that learns from a student which is missing or does not fit."""
    term = teacher.objective.from_student
    if term is None:
        return
    if len(teacher.objective.terms()) == 1:
        yield "", "needs another term beside it, such as mlm"
    if term.student not in students:
        names = ", ".join(students) or "none"
        yield "student", f"no student {term.student!r}; there are: {names}"
    elif not students[term.student].model.mlm_head:
        yield "student", f"students.{term.student}.model.mlm_head must be true, since it is read"
    elif students[term.student].generator == TEACHER:
        yield "student", f"{term.student} reads the teacher's samples; name another student"


def _sources_of(term: TermConfig, learners: Named) -> dict[str, LearnerConfig]:
    """The learners whose outputs a term reads, by name."""
    return {
        name: learner
        for name, learner in learners.items()
        if term.source == name or (term.source == MEAN and is_teacher(name))
    }


def _conflicts_of_tokenizers(learners: Named, data: DataConfig) -> Iterator[Refusal]:
    """Tokenizers of learners that cannot have their own, or compare or copy what is of others."""
    unfit = [task.name for task in _tasks_of(learners) if not task.any_tokenizer]
    what = ["several tasks"] if data.tasks else unfit
    if not data.has_examples:
        yield from _conflicts_of_text(learners, data)
    for name, config in learners.items():
        key, init = section_of(name), config.init
        if config.tokenizer is not None and what:
            why = f"is for text and tasks with labels of whole examples, not for {what[0]}"
            yield f"{key}.tokenizer", f"{why}; remove it, and train with one tokenizer"
        for term_name, term in config.objective.terms().items():
            if reason := _incomparable(term, config, _sources_of(term, learners), data):
                yield f"{key}.objective.{config.objective.key_of(term_name)}", reason
        if config.tokenizer == learners[TEACHER].tokenizer:
            continue
        for copied in ("teacher_layers", "teacher_embeddings"):
            if getattr(init, copied):
                why = "copies the teacher's embeddings, which are of another tokenizer's tokens"
                yield f"{key}.init.{copied}", f"{why}; remove it, or {key}.tokenizer"


def _incomparable(
    term: TermConfig, config: LearnerConfig, read: Named, data: DataConfig
) -> str | None:
    """Why a term cannot compare a learner with its sources, by their tokenizers or vocabularies."""
    tokenizers = {other.tokenizer for other in read.values()}
    if not tokenizers - {config.tokenizer}:
        if not isinstance(term, DivergenceConfig) or term.any_vocabulary:
            return None
        for name, other in read.items():
            if other.model.vocab_size != config.model.vocab_size:
                reason = unshared_vocabulary(config.model.vocab_size, other.model.vocab_size)
                return reason if name == TEACHER else f"{reason} ({section_of(name)})"
        return None
    if data.has_examples:
        why = "compares states, so that its teacher must have the same tokenizer"
        return why if term.reads_states else None
    if not term.compares_spans:
        return "compares token with token, so that its teacher must have the same tokenizer"
    if isinstance(term, DivergenceConfig) and term.positions == ATTENDED:
        return "compares predictions across tokenizers at masked positions only; set positions"
    if len(tokenizers) > 1:
        return "the mean is of teachers with one tokenizer; name one teacher"
    if None not in {config.tokenizer, *tokenizers}:
        return "one of the two must read by the corpus' first tokenizer; remove a tokenizer"
    return None


def _conflicts_of_text(learners: Named, data: DataConfig) -> Iterator[Refusal]:
    """Learners of text that have another tokenizer than the corpus' first one."""
    for name, config in learners.items():
        key = section_of(name)
        if config.tokenizer is None:
            continue
        if name == TEACHER:
            why = "masks are drawn on the teacher's tokens; build the corpus with its tokenizer"
            yield f"{key}.tokenizer", f"{why}, and --also the students'"
        if data.masking.on_device:
            yield "data.masking.on_device", f"{key}.tokenizer needs its masks; set it to false"
        if data.has_next_tokens:
            yield f"{key}.tokenizer", "has spans to mask, and next_token masks none; remove it"
