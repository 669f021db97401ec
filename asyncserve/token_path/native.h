/* What the parts of the extension share. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#define FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL

extern PyTypeObject SocketHandleType, TextLaneType, TextRowType, SequenceRowType;
extern PyMethodDef lane_functions[], row_functions[], hash_functions[];

/* Called once, when the module is made; -1 with an exception. */
int init_lanes(void);
int init_rows(void);
int init_hash(void);

/* Append a pair to a list; -1 with an exception. */
int append_pair(PyObject *list, PyObject *first, PyObject *second);
