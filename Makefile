# Everything a contributor types. `make help` lists it.

SHELL          := /bin/bash
BIN            := $(CURDIR)/bin
VERSION        ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS        := -s -w -X github.com/towline/towline/internal/cli/command.version=$(VERSION)
GOLANGCI       := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.14.0
CONTROLLER_GEN := sigs.k8s.io/controller-tools/cmd/controller-gen@v0.22.0

# The programs need no C. Without it, tests are compiled as the programs are, and the linker of Go links them in half of
# the processor time that the system's needs.
export CGO_ENABLED := 0

# All programs and tests are compiled with the same flags, so that each package is compiled once. Where the modules of this
# repository need the same module, they require the same version, for the same reason. Nothing needs debug information.
BUILD_FLAGS    := -trimpath -gcflags=all=-dwarf=false
export GOFLAGS := $(strip $(filter-out $(BUILD_FLAGS),$(shell go env GOFLAGS)) $(BUILD_FLAGS))
# A compiler that collects its garbage less often is faster.
BUILD_ENV      := GOGC=800

# The helm command of the release whose library the hub renders with.
HELM_VERSION := $(shell awk '$$1 == "helm.sh/helm/v4" {print $$2}' localkube/go.mod)
HELM         := $(BIN)/helm-$(HELM_VERSION)

# IMAGE is the image without its tag, as clusters pull it: <registry>/<path>. The tag is VERSION.
IMAGE     ?= towline
DIST      ?= $(CURDIR)/dist
PLATFORMS ?= linux/amd64,linux/arm64
# Charts have semantic versions.
CHART_VERSION ?= $(shell sed -E 's/^v//; /^[0-9]+\.[0-9]+\.[0-9]+([-+].*)?$$/! s/^/0.0.0-g/' <<<'$(VERSION)')

# Tests wait for control planes and clocks: on two cores, six long stories two at a time used 54 % of the processors.
# make lint runs vet.
TEST_FLAGS ?= -parallel 3 -ldflags='-s -w' -vet=off
PACKAGE_FLAGS ?= -p 2 -parallel 3
# Control planes live for seconds: collecting their garbage less often takes a quarter less of the processor, and 100 MiB more of memory each.
# Goroutines that start with a stack of the average size copy it less often: a start takes a sixth less of the processor.
TEST_ENV   := GOGC=400 GODEBUG=adaptivestackstart=1

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: towline localkube helm source-controller ## Build everything into bin/

.PHONY: towline
towline:
	@mkdir -p $(BIN)
	@echo "building towline" >&2
	@$(BUILD_ENV) go build -ldflags='$(LDFLAGS)' -o $(BIN)/ ./cmd/towline ./cmd/towline-agent
	@for name in sveltosctl karmadactl kubectl-karmada; do ln -sf towline $(BIN)/$$name; done
	@ln -sf towline-agent $(BIN)/karmada-agent

.PHONY: localkube
localkube:
	@mkdir -p $(BIN)
	@echo "building localkube and kubectl (the first time takes some minutes)" >&2
	@cd localkube && $(BUILD_ENV) go build -ldflags='-s -w' -o $(BIN)/localkube .
	@cd localkube && $(BUILD_ENV) go build -ldflags='-s -w' -o $(BIN)/kubectl ./cmd/kubectl

# Flux's source-controller, for the story about its sources.
.PHONY: source-controller
source-controller:
	@mkdir -p $(BIN)
	@echo "building source-controller (the first time takes some minutes)" >&2
	@cd test/flux && $(BUILD_ENV) go build -ldflags='-s -w' -o $(BIN)/source-controller github.com/fluxcd/source-controller

.PHONY: helm
helm: $(HELM)
	@ln -sf $(notdir $(HELM)) $(BIN)/helm

$(HELM):
	@mkdir -p $(BIN)
	@echo "building helm" >&2
	@cd localkube && $(BUILD_ENV) go build -ldflags='-s -w -X helm.sh/helm/v4/internal/version.version=$(HELM_VERSION)' -o $@ helm.sh/helm/v4/cmd/helm

.PHONY: chart
chart: $(HELM) ## Package charts/towline, with an index, into dist/charts: a chart repository to serve
	@rm -rf $(DIST)/charts && mkdir -p $(DIST)/charts
	@# The second name is the one that installations of Sveltos use: helm install projectsveltos projectsveltos/projectsveltos.
	@set -e; work=$$(mktemp -d); trap "rm -rf $$work" EXIT; for name in towline projectsveltos; do \
		cp -r charts/towline $$work/$$name; \
		sed -i "s|^name: towline$$|name: $$name|" $$work/$$name/Chart.yaml; \
		sed -i 's|^  repository: towline$$|  repository: $(IMAGE)|' $$work/$$name/values.yaml; \
		$(HELM) package $$work/$$name --version '$(CHART_VERSION)' --app-version '$(VERSION)' --destination $(DIST)/charts; \
	done
	@$(HELM) repo index $(DIST)/charts

.PHONY: image
image: ## Build the image into dist/ for PLATFORMS, without a container engine; PUSH=1 pushes it to its registry, PLAIN_HTTP=1 over http
	@go run ./cmd/image --image='$(IMAGE):$(VERSION)' --platforms='$(PLATFORMS)' --ldflags='$(LDFLAGS)' \
		--archive='$(DIST)/towline-$(VERSION).tar' $(if $(PUSH),--push $(if $(PLAIN_HTTP),--plain-http))

.PHONY: generate
generate: $(HELM) ## Regenerate deep copies and CRDs from api/, config/hub.yaml from charts/towline, and NOTICE
	@go run $(CONTROLLER_GEN) object crd:crdVersions=v1 paths=./api/... output:crd:dir=./api/crds
	@printf '%s\n' '# The hub of Towline without Helm: kubectl apply -f config/hub.yaml' '# Generated from charts/towline: make generate' \
		'apiVersion: v1' 'kind: Namespace' 'metadata:' '  name: projectsveltos' '  labels:' '    app.kubernetes.io/name: towline' > config/hub.yaml
	@$(HELM) template towline charts/towline --namespace projectsveltos | grep -v -e '^# Source: ' -e '^$$' >> config/hub.yaml
	@go run ./cmd/licenses ./cmd/towline > $(BIN)/NOTICE && mv $(BIN)/NOTICE NOTICE

.PHONY: lint
lint: ## Run all linters
	@go run $(GOLANGCI) run ./...
	@cd localkube && go run $(GOLANGCI) run --config ../.golangci.yml ./...

.PHONY: test
test: build ## Build everything and run every test, the stories included
	@# Two runs at once would compile the same packages twice.
	@$(BUILD_ENV) go build ./...
	@$(MAKE) --no-print-directory --keep-going testpackages teststories

# The stories take longest, and use both processors alone.
.PHONY: teststories
teststories:
	@$(TEST_ENV) go test -timeout 80m $(TEST_FLAGS) ./test/stories

.PHONY: testpackages
testpackages:
	@$(TEST_ENV) go test -timeout 80m $(TEST_FLAGS) $(PACKAGE_FLAGS) $$(go list ./... | grep -v /test/stories$$)

.PHONY: stories
stories: build ## Run only the user stories, with their output
	@$(TEST_ENV) go test -timeout 40m $(TEST_FLAGS) -count=1 -v ./test/stories/...

.PHONY: demo
demo: build ## Start a hub and two members and show the main job; stays until Ctrl-C
	@$(BIN)/towline demo $(DEMO_FLAGS)

.PHONY: bench
bench: build ## Measure latency, throughput and memory; prints, does not judge
	@go test -timeout 30m -run '^$$' -bench . -benchtime 1x ./test/bench/... ./internal/engine/...

.PHONY: scale
scale: build ## Measure a hub with many simulated agents: make scale SCALE_FLAGS="--clusters=1000"
	@go run ./test/scale $(SCALE_FLAGS)

# FUZZTIME is for how long each target runs, FUZZ selects targets by a regular expression, FUZZ_JOBS run at a time.
.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME; an input that fails becomes a file in testdata/fuzz of the package
	@FUZZTIME='$(FUZZTIME)' FUZZ='$(FUZZ)' .ci/fuzz

.PHONY: vulncheck
vulncheck: ## Look for known vulnerabilities in what both programs call; skipped if the database cannot be reached
	@.ci/vulncheck

# The test runs a few rounds as a part of make test. A failure names its seed and its round.
.PHONY: chaos
chaos: build ## Kill and disconnect a fleet at random: make chaos CHAOS_FLAGS="-seed=1 -rounds=200"
	@$(TEST_ENV) go test -timeout 24h -count=1 -v -run TestChaos ./test/chaos -args $(or $(CHAOS_FLAGS),-rounds=200)

.PHONY: verify
verify: generate ## Check that generated files and the package list are as committed
	@git diff --exit-code -- api config NOTICE
	@go test -count=1 -run TestArchitecture ./internal
