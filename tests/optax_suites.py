"""Optax's own common tests, run on our optimizers.

The Optax wheel ships the tests that every optimizer of Optax has to pass. They read the optimizers from module-level
tables while their classes are created, and look factories up by name. Here the installed source is executed with our
tables and our lookup in place of theirs; the `optax` package itself is not touched.
"""

import ast
import functools
import importlib.util
import pathlib
import types
import unittest

CONTRIB = "optax.contrib._common_test"
ALIAS = "optax._src.alias_test"
SHARDING = "optax._src.sharding_test"

# Tests of one particular optimizer of Optax rather than of every optimizer.
_FOREIGN = {"LBFGSTest", "test_explicit_dtype", "test_microbatch_with_explicit_sharding"}


class _Adapter(ast.NodeTransformer):
    """Takes out of a test file the assignment of its tables and whatever has nothing to do with our optimizers."""

    def __init__(self, tables):
        # Setting XLA_FLAGS goes too: `conftest.py` has done so, in time.
        self._assigned_by_us = {*tables, "os.environ['XLA_FLAGS']"}

    def visit_Assign(self, node):
        return None if ast.unparse(node.targets[0]) in self._assigned_by_us else node

    def visit_AugAssign(self, node):
        return None if ast.unparse(node.target) in self._assigned_by_us else node

    def visit_ClassDef(self, node):
        return None if node.name in _FOREIGN else self.generic_visit(node)

    def visit_FunctionDef(self, node):
        return None if node.name in _FOREIGN else self.generic_visit(node)

    def visit_ImportFrom(self, node):
        # scikit-learn serves the L-BFGS tests only.
        return None if node.module == "sklearn" else node

    def visit_If(self, node):
        # Optax 0.2.8 compares JAX versions as strings, and '0.10.2' < '0.7.2' would skip the test.
        return None if "jax.__version__" in ast.unparse(node.test) else self.generic_visit(node)


def _execute(name, tables):
    origin = importlib.util.find_spec(name).origin
    tree = _Adapter(tables).visit(ast.parse(pathlib.Path(origin).read_text()))
    module = types.ModuleType(name)
    vars(module).update(tables)
    exec(compile(tree, origin, "exec"), vars(module))
    return module


def _never_skipped(test):
    @functools.wraps(test)
    def run(self):
        try:
            test(self)
        except unittest.SkipTest as skip:
            raise AssertionError(f"skipped, so nothing was tested: {skip}") from skip

    return run


def names_of_tests(case):
    """The names of the tests of one TestCase class."""
    return unittest.TestLoader().getTestCaseNames(case)


def without(prefixes, case):
    """The class without the tests whose names begin with one of these."""
    for name in names_of_tests(case):
        if name.startswith(prefixes):
            delattr(case, name)
    return case


def _without_skips(case):
    for name in names_of_tests(case):
        setattr(case, name, _never_skipped(getattr(case, name)))
    return case


def contrib_suite(factories, entries):
    """The suite of `optax.contrib`: 16 tests for each entry, of which 4 minimise a function in 30 000 steps.

    Args:
      factories: name -> factory whose `learning_rate` is annotated `optax.ScalarOrSchedule`.
      entries: pairs of a factory's name and its arguments.
    """
    table = _table(entries, wrapper_name=None, wrapper_kwargs=None)
    module = _execute(CONTRIB, {"_ALL_OPTIMIZERS_UNDER_TEST": table, "_MAIN_OPTIMIZERS_UNDER_TEST": table})
    module._get_opt_factory = factories.__getitem__
    return _without_skips(module.ContribTest)


def alias_suite(factories, entries):
    """The suite of `optax.adam` and its like: 16 tests for each entry, real and complex, in 10 000 steps."""
    module = _execute(ALIAS, {"_OPTIMIZERS_UNDER_TEST": _table(entries)})
    module._get_opt = lambda test_case, name: factories[name]
    return _without_skips(module.AliasTest)


def sharding_suite(transformations):
    """The suite that demands equal state types before and after an update on an Explicit mesh: 3 tests for each."""
    module = _execute(SHARDING, {"OPTIMIZERS": transformations})
    return _without_skips(module.ShardingTest)


def _table(entries, **rest):
    return tuple({"opt_name": name, "opt_kwargs": kwargs, **rest} for name, kwargs in entries)
