# Functions and macros of CMakeLists.txt: one-line errors, compile and link options, the search for
# torch and CUDA, the CUDA objects, the PyTorch plugin and its type stubs.

# Stops with "gpukern: ..." on one line. CMake does not wrap a text that begins with a space.
function(gk_fail text)
  message(FATAL_ERROR " gpukern: ${text}")
endfunction()

# Stops if no compiler for `language` works. check_language tries it in a scratch project. Without
# this check, enable_language() would fail with a page of text.
macro(gk_require_compiler language name what)
  check_language(${language})
  if(NOT CMAKE_${language}_COMPILER OR (IS_ABSOLUTE "${CMAKE_${language}_COMPILER}" AND
                                        NOT EXISTS "${CMAKE_${language}_COMPILER}"))
    gk_fail("no working ${name} compiler found; install ${what} or set CC and CXX to the ones to use")
  endif()
endmacro()

# Removes -Ofast and similar flags from the user's flags, in this project only, because NaN, inf and
# subnormals must keep their meaning. A library that is linked with such a flag would also make
# processes that load it flush subnormals to 0.
macro(gk_without_fast_math)
  foreach(gk_flags C_FLAGS CXX_FLAGS SHARED_LINKER_FLAGS MODULE_LINKER_FLAGS EXE_LINKER_FLAGS C_FLAGS_RELEASE CXX_FLAGS_RELEASE
          C_FLAGS_RELWITHDEBINFO CXX_FLAGS_RELWITHDEBINFO)
    string(REGEX REPLACE "(^| )-(ffast-math|funsafe-math-optimizations|ffinite-math-only|fassociative-math|freciprocal-math|fno-signed-zeros|mdaz-ftz)( |$)"
           "  " gk_kept " ${CMAKE_${gk_flags}} ")
    string(REGEX REPLACE "(^| )-Ofast( |$)" " -O3 " gk_kept "${gk_kept}")
    string(STRIP "${gk_kept}" gk_kept)
    if(NOT gk_kept STREQUAL "${CMAKE_${gk_flags}}")
      message(STATUS "gpukern: CMAKE_${gk_flags} is \"${gk_kept}\" here: NaN, inf and subnormals keep their meaning")
      set(CMAKE_${gk_flags} "${gk_kept}")
    endif()
  endforeach()
endmacro()

function(gk_c_options target)
  # -ffp-contract=fast: a * b + c may be one fused multiply-add. Never -ffast-math: NaN and inf keep
  # their meaning.
  set(c_options -fno-fast-math -ffp-contract=fast -fno-math-errno -Wall -Wextra)
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    list(APPEND c_options -Wno-psabi) # vectors are passed between static functions of one file only
  endif()
  if(GPUKERN_WERROR)
    list(APPEND c_options -Werror)
  endif()
  if(target IN_LIST gk_unreached) # this machine cannot run its instruction set (CMakeLists.txt)
    if(GPUKERN_SANITIZE)
      list(APPEND c_options -O0)
    else() # gcc gives some of its warnings only from -O1 on
      list(APPEND c_options -O1)
    endif()
  elseif(GPUKERN_CUDA_DRAFT AND target STREQUAL "gk_base")
    # gk_base serves CPUs without AVX2, which are rare now, and -O2 saves a fifth of the compiler's
    # time. With -O2, gcc does not see that a loop over W elements sets all of them and warns.
    list(APPEND c_options -O2 -Wno-maybe-uninitialized)
  elseif(GPUKERN_SANITIZE)
    list(APPEND c_options -DGK_SANITIZED -fsanitize=${GPUKERN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    if(CMAKE_C_COMPILER_ID MATCHES "Clang") # unrolled checks would triple the compiler's time
      list(APPEND c_options -Wno-pass-failed "SHELL:-mllvm -pragma-unroll-threshold=1")
    endif()
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C>:${c_options}>")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc"
                             "${PROJECT_SOURCE_DIR}/csrc/include")
  if(gk_with_cuda)
    target_compile_definitions(${target} PRIVATE GPUKERN_HAS_CUDA=1)
  endif()
endfunction()

function(gk_link_options target)
  if(GPUKERN_SANITIZE)
    target_link_options(${target} PRIVATE -fsanitize=${GPUKERN_SANITIZE})
  endif()
  get_target_property(type ${target} TYPE)
  if(NOT APPLE AND NOT type MATCHES "EXECUTABLE|STATIC_LIBRARY")
    # The library and the plugin may be loaded into one process. Each must call its own gk_
    # functions.
    target_link_options(${target} PRIVATE LINKER:-Bsymbolic-functions)
  endif()
endfunction()

# Sets gk_with_torch, gk_torch_include and gk_torch_lib. torch is located, never imported: an import
# takes seconds.
macro(gk_find_torch)
  set(gk_with_torch OFF)
  set(gk_torch_include "${GPUKERN_TORCH_INCLUDE}")
  set(gk_torch_lib "${GPUKERN_TORCH_LIB}")
  if(GPUKERN_BUILD_TORCH MATCHES "^(OFF|0|FALSE|NO)$")
    set(torch_problem "GPUKERN_BUILD_TORCH is ${GPUKERN_BUILD_TORCH}")
  elseif(GPUKERN_SANITIZE)
    set(torch_problem "a sanitized plugin does not load into a plain Python")
  elseif(gk_torch_include AND gk_torch_lib)
    set(gk_with_torch ON)
  else()
    find_package(Python 3.10 QUIET COMPONENTS Interpreter)
    if(NOT Python_EXECUTABLE)
      set(torch_problem "no Python >= 3.10; pass -DPython_EXECUTABLE= one that has torch >= 2.10")
    else()
      execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/find_torch.py"
                      OUTPUT_VARIABLE torch_paths OUTPUT_STRIP_TRAILING_WHITESPACE
                      ERROR_VARIABLE torch_problem ERROR_STRIP_TRAILING_WHITESPACE
                      RESULT_VARIABLE torch_result)
      if(torch_result EQUAL 0)
        list(GET torch_paths 0 gk_torch_include)
        list(GET torch_paths 1 gk_torch_lib)
        set(gk_with_torch ON)
      endif()
    endif()
  endif()
  if(NOT gk_with_torch)
    if(SKBUILD AND torch_problem MATCHES " has no torch; ")
      string(APPEND torch_problem ". If it has one, the front end hides it from builds: pip install --no-build-isolation . \
(which wants scikit-build-core installed, too)")
    endif()
    if(GPUKERN_BUILD_TORCH MATCHES "^(ON|1|TRUE|YES)$")
      gk_fail("${torch_problem}")
    endif()
    message(STATUS "gpukern: C library only: ${torch_problem}")
  endif()
endmacro()

# The file name decides the architecture. X_sm90a.cu is compiled to sm_90a code. X_sm80.cu and every
# other name are compiled to sm_80 and sm_90 code and to compute_80 PTX, which serves 8.6, 8.9 and
# later GPUs. A build for 90a alone has only the sm_90 code of these files.
set(gk_cuda_flags_80 "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]")
set(gk_cuda_flags_hopper "-gencode=arch=compute_80,code=sm_90")
set(gk_cuda_flags_90a "-gencode=arch=compute_90a,code=sm_90a")

macro(gk_cuda_objects target flags)
  add_library(${target} OBJECT ${ARGN})
  set_target_properties(${target} PROPERTIES CUDA_VISIBILITY_PRESET hidden CUDA_STANDARD 17)
  target_include_directories(${target} PRIVATE csrc csrc/include)
  target_compile_options(${target} PRIVATE "${flags}" --expt-relaxed-constexpr --compress-mode=${GPUKERN_CUDA_COMPRESS}
                         -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-fno-exceptions,-fno-rtti)
  list(APPEND gk_objects ${target})
endmacro()

# Stores the messages of ptxas beside each object, as OBJECT.log. Only there does ptxas say that it
# serialised WGMMAs; tests/build/test_resources.py reads the logs.
function(gk_log_ptxas target)
  target_compile_options(${target} PRIVATE -Xptxas=-v)
  set(logged sh "${PROJECT_SOURCE_DIR}/cmake/ptxas_log.sh" ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${logged}")
endfunction()

# The sources that take more than half of the time of the CUDA build, longest first
# (docs/worklog/build_time.md). ninja starts objects in the order of their list. A long object that
# starts last would leave the other cores without work.
set(gk_cuda_longest gemm_sm90a scaled_gemm_sm90a flash_attn_fwd_sm90a gemm_sm80 scaled_gemm_swapab_sm90a weight_wgmma_4bit_sm90a
    grouped_gemm_sm90a paged_prefill_sm90a flash_attn_fwd_sm80 paged_attn_sm90a quantize gemm_skinny flash_attn_bwd_sm90a
    gemm_swapab_sm90a softmax paged_attn_sm80 norm_bwd grouped_gemm_sm80 flash_attn_bwd_wide_sm90a weight_mma_4bit_sm90a dropout
    flash_attn_bwd_sm80 scaled_gemm_sm80)

# Sorts a list of sources: those of gk_cuda_longest come first.
function(gk_longest_first list)
  set(first)
  foreach(name IN LISTS gk_cuda_longest)
    set(found ${${list}})
    list(FILTER found INCLUDE REGEX "/${name}\\.cu$")
    list(APPEND first ${found})
  endforeach()
  set(rest ${${list}})
  list(REMOVE_ITEM rest "" ${first})
  set(${list} ${first} ${rest} PARENT_SCOPE)
endfunction()

# A draft build makes no machine code for sources whose kernels docs/resources.csv already describes
# (cmake/judged.py). For them nvcc only compiles the host code and checks the syntax of the kernels,
# which takes a tenth of the time. A launch of such a kernel fails. The names of these sources are
# written to cuda_drafts.txt, which the tests of resources read.
function(gk_draft)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(NOT Python_EXECUTABLE)
    gk_fail("GPUKERN_CUDA_DRAFT is ON, but there is no Python >= 3.10; pass -DPython_EXECUTABLE=")
  endif()
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/judged.py" --nvcc "${CMAKE_CUDA_COMPILER}" drafts
                  OUTPUT_VARIABLE judged OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    gk_fail("cmake/judged.py failed; set GPUKERN_CUDA_DRAFT to OFF to compile every kernel")
  endif()
  string(REPLACE "\n" ";" judged "${judged}")
  foreach(source IN LISTS ARGN)
    file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
    if(name IN_LIST judged)
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS -fdevice-syntax-only)
      file(APPEND "${CMAKE_CURRENT_BINARY_DIR}/cuda_drafts.txt" "${name}\n")
    endif()
  endforeach()
endfunction()

# Sets gk_with_cuda: whether this build has CUDA kernels. Stops if GPUKERN_CUDA asks for kernels
# that cannot be built.
macro(gk_find_cuda)
  set(gk_with_cuda OFF)
  string(TOLOWER "${GPUKERN_CUDA}" cuda_wish)
  if(NOT cuda_wish MATCHES "^(auto|0|off|1|on)$")
    gk_fail("GPUKERN_CUDA is '${GPUKERN_CUDA}'; it takes auto, 0 or 1")
  elseif(NOT cuda_wish MATCHES "^(0|off)$")
    if(NOT cuda_sources)
      set(cuda_problem "this source tree has no CUDA kernels (csrc/cuda); set GPUKERN_CUDA to auto or 0 for the CPU")
    else()
      set(cuda_problem "nvcc was not found or does not work; install the CUDA toolkit and set CUDA_HOME to it, \
or set GPUKERN_CUDA to 0 for the CPU alone")
      set(CMAKE_CUDA_ARCHITECTURES OFF) # gk_cuda_flags_* set them, file by file
      if(NOT DEFINED ENV{CUDACXX})
        find_program(CMAKE_CUDA_COMPILER nvcc HINTS "$ENV{CUDA_HOME}/bin" PATHS /usr/local/cuda/bin)
      endif()
      check_language(CUDA)
      if(CMAKE_CUDA_COMPILER)
        set(gk_with_cuda ON)
      endif()
    endif()
    if(NOT gk_with_cuda AND NOT cuda_wish STREQUAL "auto")
      gk_fail("GPUKERN_CUDA=${GPUKERN_CUDA}, but ${cuda_problem}")
    endif()
  endif()
endmacro()

# Adds two object libraries for cuda_sources: the files for Hopper alone (_sm90a.cu), and the others.
macro(gk_add_cuda_kernels)
  set(portable hopper)
  if("80" IN_LIST GPUKERN_CUDA_ARCHS)
    set(portable 80)
  endif()
  set(portable_sources ${cuda_sources})
  list(FILTER portable_sources EXCLUDE REGEX "_sm90a\\.cu$")
  set(hopper_sources ${cuda_sources})
  list(FILTER hopper_sources INCLUDE REGEX "_sm90a\\.cu$")
  if(NOT "90a" IN_LIST GPUKERN_CUDA_ARCHS)
    set(hopper_sources)
  endif()
  if(GPUKERN_CUDA_DRAFT)
    gk_draft(${hopper_sources} ${portable_sources})
  endif()
  gk_longest_first(hopper_sources)
  gk_longest_first(portable_sources)
  if(hopper_sources)
    gk_cuda_objects(gk_cuda_90a "${gk_cuda_flags_90a}" ${hopper_sources})
    gk_log_ptxas(gk_cuda_90a)
  endif()
  gk_cuda_objects(gk_cuda_${portable} "${gk_cuda_flags_${portable}}" ${portable_sources})
endmacro()

# Sets gk_with_cuda, gk_cuda_libraries and gk_cuda_runtime, and appends the CUDA objects to
# gk_objects.
macro(gk_add_cuda)
  if(NOT GPUKERN_CUDA_SM80)
    set(gk_cuda_flags_80 "-gencode=arch=compute_80,code=[sm_90,compute_80]")
  endif()
  file(REMOVE "${CMAKE_CURRENT_BINARY_DIR}/cuda_drafts.txt")
  set(gk_cuda_libraries)
  set(gk_cuda_runtime)
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cu)
  string(REPLACE "," ";" GPUKERN_CUDA_ARCHS "${GPUKERN_CUDA_ARCHS}")
  foreach(arch IN LISTS GPUKERN_CUDA_ARCHS)
    if(NOT arch MATCHES "^(80|90a)$")
      gk_fail("GPUKERN_CUDA_ARCHS has '${arch}'; it takes 80, 90a or both")
    endif()
  endforeach()
  gk_find_cuda()
  if(gk_with_cuda)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(gk_cuda_libraries CUDA::cudart_static)
    # nvcc's stubs initialise static variables with routines of the C++ runtime. The C library links
    # these routines statically, so that it can still be linked as C. The plugin uses torch's C++
    # library and must not get a second one.
    set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
    set(gk_cuda_runtime -static-libgcc -Wl,-Bstatic -lstdc++ -Wl,-Bdynamic)
    gk_add_cuda_kernels()
  endif()
endmacro()

function(gk_ops_options target)
  target_include_directories(${target} PRIVATE csrc csrc/include)
  target_include_directories(${target} SYSTEM PRIVATE "${gk_torch_include}")
  # The binary runs on torch 2.10 and later. USE_CUDA only declares torch's CUDA shims, which ops/
  # makes weak.
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000 USE_CUDA
                             $<$<BOOL:${gk_with_cuda}>:GPUKERN_HAS_CUDA=1>)
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${GPUKERN_WERROR}>:-Werror>
                         "-fmacro-prefix-map=${gk_torch_include}/=")
endfunction()

# The objects of ops/ that do not depend on the namespace: all but namespace.cpp.
macro(gk_add_ops)
  file(GLOB ops_sources CONFIGURE_DEPENDS ops/*.cpp)
  list(FILTER ops_sources EXCLUDE REGEX "/namespace\\.cpp$")
  add_library(gk_ops OBJECT ${ops_sources})
  gk_ops_options(gk_ops)
endmacro()

# The PyTorch plugin as a module library, with its ops in `namespace`.
function(gk_add_plugin target namespace)
  add_library(${target} MODULE ops/namespace.cpp $<TARGET_OBJECTS:gk_ops> ${gk_object_files})
  gk_ops_options(${target})
  target_compile_definitions(${target} PRIVATE GPUKERN_NAMESPACE=${namespace})
  # CPU and CUDA builds of torch both have libtorch.so, which loads torch's other libraries. The
  # plugin uses no symbol of libtorch.so itself, so --no-as-needed keeps the dependency.
  target_link_libraries(${target} PRIVATE m -Wl,--no-as-needed "${gk_torch_lib}/libtorch.so" -Wl,--as-needed
                        ${gk_cuda_libraries})
  gk_link_options(${target})
endfunction()

# Generates the .pyi files of modules of torch_gpukern/ops when `target` is built, and installs them
# in `destination`.
function(gk_add_stubs target destination)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(NOT Python_EXECUTABLE)
    gk_fail("no Python >= 3.10, which writes the types of the Python package; pass -DPython_EXECUTABLE=")
  endif()
  set(script "${PROJECT_SOURCE_DIR}/cmake/stubs.py")
  foreach(module IN LISTS ARGN)
    set(source "${PROJECT_SOURCE_DIR}/torch_gpukern/ops/${module}.py")
    set(stub "${CMAKE_CURRENT_BINARY_DIR}/stubs/${module}.pyi")
    add_custom_command(OUTPUT "${stub}" COMMAND "${Python_EXECUTABLE}" "${script}" "${source}" "${stub}"
                       DEPENDS "${source}" "${script}" VERBATIM)
    list(APPEND stubs "${stub}")
  endforeach()
  add_custom_target(${target}_stubs DEPENDS ${stubs})
  add_dependencies(${target} ${target}_stubs)
  install(FILES ${stubs} DESTINATION "${destination}" COMPONENT torch EXCLUDE_FROM_ALL)
endfunction()
