"""Search: which layout, caps and plugins for these lengths on these machines?

Every setting is bounded before it is planned, and planned in the order of the bounds.
"""

from ...core import verbs

verbs.register(verbs.Verb("search", "evenload.plugins.search.verb:search", order=50))
