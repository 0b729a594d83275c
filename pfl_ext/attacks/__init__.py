"""What users do who want to harm a model, to try `pfl_ext.aggregation` with."""
