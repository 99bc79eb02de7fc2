"""What the verbs that train do, one module a verb: a recipe and plain arguments in, the result out."""
