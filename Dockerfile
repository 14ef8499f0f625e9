# The one image of Towline, for the hub and for agents: docker build -t <registry>/towline:<version> --build-arg VERSION=<version> .
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
RUN CGO_ENABLED=0 go build -trimpath -ldflags="-s -w -X github.com/towline/towline/internal/cli.version=${VERSION}" -o /out/manager ./cmd/towline && \
    mkdir /out/bin && ln -s /manager /out/bin/karmada-agent

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/ /
USER 65532:65532
ENTRYPOINT ["/manager"]
