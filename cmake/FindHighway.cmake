# Finds Google Highway by its CMake package or, failing that, by pkg-config; gives the target lean::highway.
# Installed beside LeanAttentionConfig.cmake: a static liblean_attention needs it again.
find_package(hwy ${Highway_FIND_VERSION} QUIET CONFIG)
if(TARGET hwy::hwy)
  set(Highway_VERSION ${hwy_VERSION})
  set(Highway_TARGET hwy::hwy)
else()
  find_package(PkgConfig QUIET)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(Highway_PC QUIET IMPORTED_TARGET libhwy>=${Highway_FIND_VERSION})
    if(Highway_PC_FOUND)
      set(Highway_VERSION ${Highway_PC_VERSION})
      set(Highway_TARGET PkgConfig::Highway_PC)
    endif()
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Highway REQUIRED_VARS Highway_TARGET VERSION_VAR Highway_VERSION
  REASON_FAILURE_MESSAGE "install libhwy-dev (Debian, Ubuntu) or github.com/google/highway")

if(Highway_FOUND AND NOT TARGET lean::highway)
  add_library(lean::highway INTERFACE IMPORTED)
  target_link_libraries(lean::highway INTERFACE ${Highway_TARGET})
endif()
