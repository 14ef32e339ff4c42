"""Objectives f = (1/n) sum_i f_i with their exact constants and reference optima."""

from commjax.problems import constants, logistic, quadratic

__all__ = ["constants", "logistic", "quadratic"]
