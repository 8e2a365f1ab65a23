"""Lockstep groups of real engine cores: what heads and subscribers see of their waves, and how they end."""
