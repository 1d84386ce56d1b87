"""This library's trainer as a trainer under test: how its legs are started, built, instrumented and stopped."""
