"""A frozen teacher's predictions, stored once for any number of jobs that read the same batches.

`tandem store` runs the teacher over every batch of a job, and writes its k largest logits at every
masked position to shards in a folder. A job with the section `teacher.stored` reads them instead of
running the teacher.

- What is stored are logits, in the numbers that students would have read, not probabilities. So a
  term reads them at any temperature. Where k is the size of the vocabulary and the precision is
  fp32, losses and gradients are those of the running teacher, bit for bit. With fewer, the target
  is the softmax over the k logits alone.
- With `samples` tokens are stored that are drawn from the distribution at one temperature, as in
  `reading`. Their shares are an unbiased target, and need no numbers beside the tokens.
- They are in the order of the batches, by the batch's number: which masks and sequences a step has
  is a pure function of the config and the corpora (`trainer.lifecycle.continuity` lists the keys).
  The manifest holds both, and a checksum of the teacher's weights.
- Examples that the teacher reads alike in every epoch are stored once, in the batches of the first
  epoch, and found by their numbers. There the bits are those of the running teacher; in later
  epochs an example stands among others, which decides how a kernel rounds.
- A row holds as many positions as it has labels, so that nothing of the masks is stored but their
  number. A reader compares it with the row's.
- A shard is complete steps, up to `SHARD_BYTES`, as safetensors. Shards and manifest are written
  atomically, and their content is a pure function of the job, so a writer that was killed resumes
  after its last complete shard. Only one writes a folder at a time. The number of ranks makes no
  difference as long as micro-batches hold the same rows, which decides how a kernel rounds.
- The teacher's weights are still in a job that reads its predictions: for scores, exports and
  students that begin with its layers. They wait in host memory (`LearnerConfig.at_rest`).
- The mean of several teachers is not stored; nor is anything that only states could give.
"""
