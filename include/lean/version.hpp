// The version of the library: semantic, one place. CMake reads it from here.
#pragma once

#define LEAN_VERSION_MAJOR 0
#define LEAN_VERSION_MINOR 1
#define LEAN_VERSION_PATCH 0
#define LEAN_VERSION_STRING "0.1.0"
