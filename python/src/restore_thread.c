/* Python up to 3.13 ends a daemon thread that wants the interpreter back while that ends, by pthread_exit(): all frames would
 * be unwound, and C++ ones of this module cannot be, whose unwinder is its own. From 3.14 on such a thread waits for the end of
 * the process, as here. In C, since pthread_cleanup_push() is a handler there, which runs at this frame, and a destructor in
 * C++. */
#include "restore_thread.h"

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
