"""Value types, ids, the error tree and the ports other rooms meet at. Standard library only.

Knows nothing of storage, HTTP or torch.
"""
