"""Content of pages: functions of a `Studio` that give frozen values, without HTTP."""
