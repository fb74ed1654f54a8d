/* PyEval_RestoreThread() that neither returns nor unwinds where the interpreter is ending. */
#pragma once

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

void lean_restore_thread(PyThreadState* state);

#ifdef __cplusplus
}
#endif
