"""A page on this machine alone that shows run folders while runs go on."""

from caddie.board.server import Board

__all__ = ["Board"]
