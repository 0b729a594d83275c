import pfl_ext as pfl_ext  # before pfl, see there
