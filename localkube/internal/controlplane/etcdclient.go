package controlplane

import (
	"context"
	_ "unsafe" // for go:linkname

	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/feature"
	"k8s.io/apiserver/pkg/storage/storagebackend"
)

// newETCD3Client creates the clients of the API server, one for each kind.
//
//nolint:gochecknoglobals // upstream's, not ours
//go:linkname newETCD3Client k8s.io/apiserver/pkg/storage/storagebackend/factory.newETCD3Client
var newETCD3Client func(storagebackend.TransportConfig) (*etcdkubernetes.Client, error)

// callDirectly makes the API server call functions of etcd. Upstream has a connection with gRPC for each kind.
func callDirectly(ctx context.Context, server *etcdserver.EtcdServer) {
	newETCD3Client = func(storagebackend.TransportConfig) (*etcdkubernetes.Client, error) {
		client := &etcdkubernetes.Client{Client: v3client.New(server)}
		client.Kubernetes = client
		return client, nil
	}
	// Upstream checks each endpoint of a client. Without this check, lists are not read from the watch caches.
	feature.DefaultFeatureSupportChecker.CheckClient(ctx, endpointClient{v3client.New(server)}, storage.RequestWatchProgress)
}

// endpointClient is a client with an endpoint.
type endpointClient struct{ *clientv3.Client }

// Endpoints returns the endpoint.
func (endpointClient) Endpoints() []string { return []string{"this process"} }
