"""Python runs this as it starts: every process, workers included, gets the emulator."""

from ascend.emulator.install import install_on_import

install_on_import()
