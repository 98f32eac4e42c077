"""The test bed of `scripts/testbed`: a cluster of real nodes with real sshd on one machine."""
