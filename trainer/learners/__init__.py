"""A model in training: its state, its engine, when it joins, where its first weights come from."""
