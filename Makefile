# Versions of the tools. They are built into .cache, apart from go.mod.
GOLANGCI_VERSION := v2.15.0
CACHE := $(CURDIR)/.cache
LINT := $(CACHE)/golangci-lint-$(GOLANGCI_VERSION)

# -race needs a C compiler; without one the tests run all the same, and say so.
RACE := $(shell command -v $$(go env CC) >/dev/null 2>&1 && echo -race)
FUZZTIME ?= 1m
SIMULATIONS ?= 10000
SEED ?= 0
PEERS ?=
FOR ?= 60s
BUS ?= nats
FORMER ?=
EVENTS ?= 1000000
ROUNDS ?= 3

.DEFAULT_GOAL := help
.PHONY: help build demo test e2e simulate soak lint bench bench-kube fuzz tidy-check check clean

help: ## Show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build bin/engine
	go build -trimpath -ldflags "-X main.version=$$(git describe --tags --always --dirty 2>/dev/null || echo dev)" -o bin/engine ./cmd/engine

demo: build ## Show what the engine does, in half a minute
	bin/engine demo

test: ## Run all tests (under 5 minutes)
	@test -n "$(RACE)" || echo "no C compiler found: testing without -race"
	go test $(RACE) -timeout 5m ./...

e2e: build ## Run the demo, the examples and the tests on real servers, which are built the first time (minutes)
	bin/engine demo --for 20s -o json
	go run ./internal/testbed/with -- go test $(RACE) -tags e2e -count=1 -timeout 10m ./internal/integration/... ./adapters/consul/... ./adapters/k8s/...

simulate: ## Live 10,000 random lives with crashes and faults (SIMULATIONS, SEED)
	go test -count=1 -timeout 20m -run '^TestSimulation$$' ./engine -args -simulations $(SIMULATIONS) -seed $(SEED)

soak: ## Disturb replicas on a real server for a while and check that nothing is lost (FOR, SEED, BUS: nats, nats3, redis, FORMER: the commit of one of the replicas)
	$(if $(FORMER),former=$$(internal/soak/former.sh $(FORMER)) &&) go run ./internal/soak -bus $(BUS) -for $(FOR) $(if $(filter-out 0,$(SEED)),-seed $(SEED)) $(if $(FORMER),-former $$former)

lint: $(LINT) ## Run the linters
	$(LINT) run ./...

$(LINT):
	GOBIN=$(CACHE)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv $(CACHE)/bin/golangci-lint $@

bench: build ## Measure the engine and, alternating, its peers (ROUNDS, EVENTS, PEERS)
	ROUNDS=$(ROUNDS) EVENTS=$(EVENTS) PEERS=$(PEERS) ./internal/bench/compare.sh

bench-kube: ## Measure the engine and, alternating, controller-runtime on a real API server (PEERS, ROUNDS)
	ROUNDS=$(ROUNDS) PEERS=$(PEERS) go run ./internal/testbed/with -- ./internal/bench/kube.sh

fuzz: ## Fuzz what reads foreign input, FUZZTIME (1m) each
	go test -run '^$$' -fuzz '^FuzzParseKey$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./engine
	go test -run '^$$' -fuzz '^FuzzDecode$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./engine
	go test -run '^$$' -fuzz '^FuzzLoad$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./engine/app
	go test -run '^$$' -fuzz '^FuzzOpen$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./internal/envelope
	go test -run '^$$' -fuzz '^FuzzTemplate$$' -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./engine/sync

tidy-check: ## Fail if go.mod or the formatting is not in order
	go mod tidy -diff
	@test -z "$$(gofmt -l .)" || { gofmt -l .; exit 1; }

check: tidy-check lint build test ## What must pass before a change lands

clean: ## Remove what was built
	rm -rf bin .cache
