# Everything a contributor types. `make help` lists it.

SHELL          := /bin/bash
BIN            := $(CURDIR)/bin
VERSION        ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS        := -s -w -X github.com/towline/towline/internal/cli.version=$(VERSION)
GOLANGCI       := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.14.0
CONTROLLER_GEN := sigs.k8s.io/controller-tools/cmd/controller-gen@v0.22.0

# Tests wait for control planes and clocks more than they compute.
TEST_FLAGS ?= -parallel 4
# Control planes live for seconds: collecting their garbage less often takes a quarter less of the processor, and 100 MiB more of memory each.
TEST_ENV   := GOGC=400

# The control planes for tests are built for build time, not for speed: see localkube/README.md.
LOCALKUBE_ENV   := CGO_ENABLED=0 GOGC=800
LOCALKUBE_FLAGS := -gcflags=all='-l -dwarf=false' -ldflags='-s -w'

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: towline localkube ## Build everything into bin/

.PHONY: towline
towline:
	@mkdir -p $(BIN)
	@echo "building towline" >&2
	@CGO_ENABLED=0 go build -trimpath -ldflags='$(LDFLAGS)' -o $(BIN)/towline ./cmd/towline
	@for name in sveltosctl karmadactl kubectl-karmada karmada-agent; do ln -sf towline $(BIN)/$$name; done

.PHONY: localkube
localkube:
	@mkdir -p $(BIN)
	@echo "building localkube and kubectl (the first time takes some minutes)" >&2
	@cd localkube && $(LOCALKUBE_ENV) go build $(LOCALKUBE_FLAGS) -o $(BIN)/localkube .
	@cd localkube && $(LOCALKUBE_ENV) go build $(LOCALKUBE_FLAGS) -o $(BIN)/kubectl ./cmd/kubectl

.PHONY: generate
generate: ## Regenerate deep copies and CRDs from api/
	@go run $(CONTROLLER_GEN) object crd:crdVersions=v1 paths=./api/... output:crd:dir=./api/crds

.PHONY: lint
lint: ## Run all linters
	@go run $(GOLANGCI) run ./...
	@cd localkube && go run $(GOLANGCI) run --config ../.golangci.yml ./...

.PHONY: test
test: build ## Build everything and run every test, the stories included
	@$(TEST_ENV) go test -timeout 25m $(TEST_FLAGS) ./...

.PHONY: stories
stories: build ## Run only the user stories, with their output
	@$(TEST_ENV) go test -timeout 25m $(TEST_FLAGS) -count=1 -v ./test/stories/...

.PHONY: demo
demo: build ## Start a hub and two members and show the main job; stays until Ctrl-C
	@$(BIN)/towline demo $(DEMO_FLAGS)

.PHONY: bench
bench: build ## Measure latency, throughput and memory; prints, does not judge
	@go test -timeout 30m -run '^$$' -bench . -benchtime 1x ./test/bench/... ./internal/engine/...

.PHONY: verify
verify: generate ## Check that generated files and the package list are as committed
	@git diff --exit-code -- api
	@go test -count=1 -run TestArchitecture ./internal
