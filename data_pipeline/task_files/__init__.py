"""Files of labelled examples in the layouts in which tasks are published."""
