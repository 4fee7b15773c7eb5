# turnwise_choose_cuda(MODE PYTHON): whether to build the CUDA part. Sets `with_cuda` and, in words, `cuda_reason`.
#
# MODE is TURNWISE_CUDA, checked already. AUTO looks for somebody whom CUDA kernels would serve before it looks for nvcc:
# a GPU in this machine, or a torch for CUDA in the environment of PYTHON. Six architectures take minutes to compile,
# and beside a CPU build of torch nothing could call them.
include_guard()

# torch's own version.py says what it was built for; reading it costs no import of torch.
set(turnwise_torch_cuda [=[
import importlib.util, pathlib, runpy
torch = importlib.util.find_spec("torch")
file = torch and torch.origin and pathlib.Path(torch.origin).with_name("version.py")
print(file and file.is_file() and runpy.run_path(str(file)).get("cuda") or "", end="")
]=])

# What CUDA kernels would serve here, in words; empty for nothing.
function(turnwise_find_cuda_user python result)
  find_program(nvidia_smi nvidia-smi NO_CACHE)
  if(nvidia_smi)
    execute_process(COMMAND "${nvidia_smi}" -L OUTPUT_VARIABLE gpus ERROR_QUIET RESULT_VARIABLE status TIMEOUT 30)
    if(status EQUAL 0 AND gpus MATCHES "(^|\n)GPU [0-9]+: ([^\n(]*[^\n( ])")
      set(${result} "a GPU (${CMAKE_MATCH_2})" PARENT_SCOPE)
      return()
    endif()
  endif()
  execute_process(COMMAND "${python}" -c "${turnwise_torch_cuda}" OUTPUT_VARIABLE version ERROR_QUIET)
  if(version)
    set(${result} "a torch for CUDA ${version}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()

macro(turnwise_choose_cuda mode python)
  set(with_cuda OFF)
  set(cuda_reason "TURNWISE_CUDA=${mode}")
  set(cuda_user "")
  if("${mode}" STREQUAL "AUTO")
    turnwise_find_cuda_user("${python}" cuda_user)
    set(cuda_reason "found no GPU and no torch for CUDA; TURNWISE_CUDA=ON builds it all the same")
  endif()
  if("${mode}" STREQUAL "ON" OR cuda_user)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(with_cuda ON)
      set(cuda_reason "TURNWISE_CUDA=ON")
      if(cuda_user)
        set(cuda_reason "found nvcc and ${cuda_user}")
      endif()
    elseif("${mode}" STREQUAL "ON")
      message(FATAL_ERROR "TURNWISE_CUDA=ON: expected nvcc on the PATH or in CUDACXX, found none. Install the CUDA toolkit.")
    else()
      set(cuda_reason "found ${cuda_user} but no nvcc")
    endif()
  endif()
endmacro()
