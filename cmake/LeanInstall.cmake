# Install rules. Component library: headers, library, CMake package LeanAttention, pkg-config file; component command: `lean`.
# tests/packaging installs into an empty prefix and builds examples/ against it both ways.
include(CMakePackageConfigHelpers)
set(lean_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/LeanAttention)

# `make demo` builds the command alone: what was not built is named before anything is copied.
function(lean_install_needs target component)
  install(CODE "if(NOT EXISTS \"$<TARGET_FILE:${target}>\")
    message(FATAL_ERROR \"$<TARGET_FILE_NAME:${target}> is not built. Build it, by cmake --build ${PROJECT_BINARY_DIR} --target \"
      \"${target}, or install what is there by itself: cmake --install with --component library or --component command\")
  endif()" COMPONENT ${component})
endfunction()
lean_install_needs(lean library)
if(LEAN_CLI AND NOT LEAN_SANITIZE)
  lean_install_needs(lean_cli command)
endif()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lean DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(TARGETS lean EXPORT LeanAttentionTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(EXPORT LeanAttentionTargets NAMESPACE LeanAttention:: DESTINATION ${lean_cmake_dir} COMPONENT library)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/LeanAttentionConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/LeanAttentionConfig.cmake INSTALL_DESTINATION ${lean_cmake_dir})
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(lean_compatibility SameMinorVersion)
else()
  set(lean_compatibility SameMajorVersion)
endif()
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/LeanAttentionConfigVersion.cmake COMPATIBILITY ${lean_compatibility})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/LeanAttentionConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/LeanAttentionConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindHighway.cmake DESTINATION ${lean_cmake_dir} COMPONENT library)

# A shared library brings its own dependencies; users of a static one link them.
if(BUILD_SHARED_LIBS)
  set(lean_pc_private "")
else()
  set(lean_pc_private "Requires.private: libhwy\nLibs.private: -lstdc++ -lm -lpthread ${OpenMP_CXX_FLAGS}")
endif()
# Paths in the .pc file are relative to itself, so an installed tree may be moved.
file(RELATIVE_PATH lean_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" lean_pc_to_prefix "${lean_pc_to_prefix}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/lean_attention.pc.in ${CMAKE_CURRENT_BINARY_DIR}/lean_attention.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/lean_attention.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
