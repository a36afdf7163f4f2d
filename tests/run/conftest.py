from runs import documents, values

__all__ = ['documents', 'values']
