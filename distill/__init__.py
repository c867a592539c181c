"""From specialists to one generalist: datasets, training, evaluation, reports, the pipeline."""
