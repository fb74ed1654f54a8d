/* Python up to 3.13 ends a daemon thread that wants the interpreter back while that ends, by pthread_exit(): all frames would
 * be unwound, and C++ ones of this module cannot be, whose unwinder is its own. From 3.14 on such a thread waits for the end of
 * the process, as here. In C, since pthread_cleanup_push() is a handler there, which runs at this frame, and a destructor in
 * C++. */
#include "interpreter_end.h"

#include <pthread.h>
#include <unistd.h>

static void wait_for_the_end(void* unused) {
  (void)unused;
  while (1) pause();
}

void lean_restore_thread(PyThreadState* state) {
  pthread_cleanup_push(wait_for_the_end, NULL);
  PyEval_RestoreThread(state);
  pthread_cleanup_pop(0);
}

PyObject* lean_get_attribute(PyObject* object, PyObject* name) {
  PyObject* value;
  pthread_cleanup_push(wait_for_the_end, NULL);
  value = PyObject_GetAttr(object, name);
  pthread_cleanup_pop(0);
  return value;
}

PyObject* lean_call(PyObject* callable, PyObject* arguments, PyObject* keywords) {
  PyObject* result;
  pthread_cleanup_push(wait_for_the_end, NULL);
  result = PyObject_Call(callable, arguments, keywords);
  pthread_cleanup_pop(0);
  return result;
}

PyObject* lean_call_with(PyObject* callable, PyObject* first, PyObject* second) {
  PyObject* result;
  pthread_cleanup_push(wait_for_the_end, NULL);
  result = PyObject_CallFunctionObjArgs(callable, first, second, NULL);
  pthread_cleanup_pop(0);
  return result;
}

PyObject* lean_call_method(PyObject* object, PyObject* name, PyObject* argument) {
  PyObject* result;
  pthread_cleanup_push(wait_for_the_end, NULL);
  result = PyObject_CallMethodObjArgs(object, name, argument, NULL);
  pthread_cleanup_pop(0);
  return result;
}

PyObject* lean_number_index(PyObject* number) {
  PyObject* integer;
  pthread_cleanup_push(wait_for_the_end, NULL);
  integer = PyNumber_Index(number);
  pthread_cleanup_pop(0);
  return integer;
}
