from runs import documents, small, values

__all__ = ['documents', 'small', 'values']
