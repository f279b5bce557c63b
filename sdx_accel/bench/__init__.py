"""Measures whole pictures on this machine; drives the public interface, is used by nothing."""
