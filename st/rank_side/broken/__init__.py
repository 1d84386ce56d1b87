"""Tests that break their run, each in one way, for :mod:`st.rank_side_selftest`; they are not collected by themselves."""
