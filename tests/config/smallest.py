"""The keys that every run has to give, and no others."""

VALUES = {
    'name': 'test',
    'steps': 10,
    'model': {'n_layers': 2, 'd_model': 64, 'attention': {'n_heads': 2}},
    'data': {'text': 'stdlib'},
    'batch': {'tokens': 1024, 'sequence_length': 128},
    'optimizer': {'learning_rate': 0.1},
}
