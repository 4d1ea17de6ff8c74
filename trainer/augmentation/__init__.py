"""`tandem data augment`: more examples of a task, by what a model says of their words."""
