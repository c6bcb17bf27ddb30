# All images, with attestations, into a registry; variables are set in the environment:
#   REGISTRY=registry.example/team docker buildx bake -f docker/docker-bake.hcl --push                (every profile)
#   REGISTRY=registry.example/team docker buildx bake -f docker/docker-bake.hcl hopper-fp8 --push
# Attestations and several platforms need a builder of the driver docker-container, or the containerd image store, which
# alone can --load them too. One image on this machine: docker build -f docker/Dockerfile --target hopper-fp8 .

variable "REGISTRY" { default = "" }     # before the name: registry.example/team
variable "VERSION" { default = "0.1.0" } # trainer.__version__
variable "REVISION" { default = "" }     # of the source: git rev-parse HEAD
variable "CREATED" { default = "" }      # RFC 3339; empty: no label, so that equal inputs give equal images
variable "BASE_IMAGE" { default = "debian:bookworm-slim" }
variable "CUDA_VERSION" { default = "13.0" }
variable "TORCH_VERSION" { default = "2.13.0" }
variable "TORCHVISION_VERSION" { default = "0.28.0" }
variable "EXTRAS" { default = "nf4 flash-attn-4" }
variable "KERNELS" { default = "none" } # build: compile flash-attn 2 for rtx-4090 and hopper-fp8
# Package indexes of PyTorch's builds: the target cpu is 5 GB smaller with that of CPU builds, CUDA 12 needs its own. No
# default: PyTorch's installation page names them.
variable "TORCH_INDEX" { default = "" }
variable "TORCH_INDEX_CUDA12" { default = "" }
# Without network: a folder of wheels, PIP_NO_INDEX=1, and a BASE_IMAGE with the system's packages, for example
#   WHEELS=/media/usb/wheels PIP_NO_INDEX=1 BASE_IMAGE=my-base docker buildx bake -f docker/docker-bake.hcl cpu
variable "WHEELS" { default = "" }
variable "PIP_NO_INDEX" { default = "" }
# A pip.conf and a certificate authority of yours (beside the system's), as files: mounted while pip runs, in no layer.
variable "PIP_CONF" { default = "" }
variable "CA_CERTIFICATES" { default = "" }

function "tags" {
  params = [variant]
  result = [REGISTRY != "" ? "${trimsuffix(REGISTRY, "/")}/trainer:${VERSION}-${variant}" : "trainer:${VERSION}-${variant}"]
}

group "default" {
  targets = ["dgx-spark", "rtx-4090", "hopper-fp8", "generic-cuda", "cpu"]
}

target "_common" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  contexts   = WHEELS != "" ? { wheels = WHEELS } : {}
  args = {
    BASE_IMAGE          = BASE_IMAGE
    TORCH_VERSION       = TORCH_VERSION
    TORCHVISION_VERSION = TORCHVISION_VERSION
    EXTRAS              = EXTRAS
    PIP_NO_INDEX        = PIP_NO_INDEX
    VERSION             = VERSION
    REVISION            = REVISION
  }
  secret = concat(
    PIP_CONF != "" ? ["id=pip.conf,src=${PIP_CONF}"] : [],
    CA_CERTIFICATES != "" ? ["id=ca.crt,src=${CA_CERTIFICATES}"] : [],
  )
  labels = {
    "org.opencontainers.image.base.name" = BASE_IMAGE
    "org.opencontainers.image.created"   = CREATED != "" ? CREATED : null
  }
  attest = ["type=provenance,mode=max", "type=sbom"]
}

target "_cuda" {
  inherits = ["_common"]
  args     = { CUDA_VERSION = CUDA_VERSION, KERNELS = KERNELS, TORCH_INDEX = TORCH_INDEX }
}

target "dgx-spark" {
  inherits  = ["_cuda"]
  target    = "dgx-spark"
  platforms = ["linux/arm64"]
  tags      = tags("dgx-spark")
}

target "rtx-4090" {
  inherits  = ["_cuda"]
  target    = "rtx-4090"
  platforms = ["linux/amd64"]
  tags      = tags("rtx-4090")
}

target "hopper-fp8" {
  inherits  = ["_cuda"]
  target    = "hopper-fp8"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = tags("hopper-fp8")
}

target "generic-cuda" {
  inherits  = ["_cuda"]
  target    = "generic-cuda"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = tags("generic-cuda")
}

target "cpu" {
  inherits  = ["_common"]
  target    = "cpu"
  platforms = ["linux/amd64", "linux/arm64"]
  args      = { TORCH_INDEX = TORCH_INDEX }
  tags      = tags("cpu")
}

# For drivers from 525 to 579. Nobody has built it: the index must have torch ${TORCH_VERSION} for this CUDA.
target "generic-cuda12" {
  inherits  = ["_common"]
  target    = "generic-cuda"
  platforms = ["linux/amd64"]
  args      = { CUDA_VERSION = "12.6", TORCH_INDEX = TORCH_INDEX_CUDA12, EXTRAS = "nf4" }
  tags      = tags("generic-cuda12")
}
