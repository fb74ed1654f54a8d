/* What of the C API may run Python code of others, or wait for the interpreter: functions that neither return nor unwind where the
 * interpreter is ending. C++ of this module calls these. Arguments may be null from the last one on. */
#pragma once

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

void lean_restore_thread(PyThreadState* state);
PyObject* lean_get_attribute(PyObject* object, PyObject* name);
PyObject* lean_call(PyObject* callable, PyObject* arguments, PyObject* keywords);
PyObject* lean_call_with(PyObject* callable, PyObject* first, PyObject* second);
PyObject* lean_call_method(PyObject* object, PyObject* name, PyObject* argument);
PyObject* lean_number_index(PyObject* number);

#ifdef __cplusplus
}
#endif
