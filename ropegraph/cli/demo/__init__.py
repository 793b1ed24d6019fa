"""The main job: graphs, folds, errors against fp64, and a model trained beside plain torch."""
