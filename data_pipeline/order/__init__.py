"""The order of training: which sequence each row of each step reads."""
