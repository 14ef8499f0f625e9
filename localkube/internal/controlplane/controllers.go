package controlplane

import (
	"context"
	"fmt"
	"os"
	"time"

	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/controller-manager/pkg/informerfactory"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/bootstrap"
	"k8s.io/kubernetes/pkg/controller/certificates/approver"
	"k8s.io/kubernetes/pkg/controller/certificates/cleaner"
	"k8s.io/kubernetes/pkg/controller/certificates/rootcacertpublisher"
	"k8s.io/kubernetes/pkg/controller/certificates/signer"
	"k8s.io/kubernetes/pkg/controller/clusterroleaggregation"
	"k8s.io/kubernetes/pkg/controller/daemon"
	"k8s.io/kubernetes/pkg/controller/deployment"
	"k8s.io/kubernetes/pkg/controller/endpoint"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
	"k8s.io/kubernetes/pkg/controller/job"
	"k8s.io/kubernetes/pkg/controller/podgc"
	"k8s.io/kubernetes/pkg/controller/replicaset"
	"k8s.io/kubernetes/pkg/controller/serviceaccount"
	"k8s.io/kubernetes/pkg/controller/statefulset"
	"k8s.io/kubernetes/pkg/controller/volume/pvcprotection"
	tokens "k8s.io/kubernetes/pkg/serviceaccount"
)

const (
	// workers is how many objects each controller works on at a time; the upstream default of most of them.
	workers = 5
	// discoveryPeriod bounds how long the garbage collector does not know a new CustomResourceDefinition. Upstream: 30 s.
	discoveryPeriod = 5 * time.Second
	// endpointsPerSlice is the upstream default.
	endpointsPerSlice = 100
	// signedCertificateLife is how long a certificate lives whose request names no shorter life; the upstream default.
	signedCertificateLife = 365 * 24 * time.Hour
)

// controllers builds upstream controllers that share one client and one set of informers, and then runs them.
type controllers struct {
	config    *rest.Config
	client    kubernetes.Interface
	metadata  metadata.Interface
	informers informers.SharedInformerFactory
	certs     pki
	started   chan struct{}
	run       []func(context.Context)
}

func newControllers(ctx context.Context, config *rest.Config, certs pki) (*controllers, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("build controller client: %w", err)
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("build controller metadata client: %w", err)
	}
	c := &controllers{
		config: config, client: client, metadata: metadataClient, certs: certs,
		informers: informers.NewSharedInformerFactory(client, 0),
		started:   make(chan struct{}),
	}
	for _, add := range []func(context.Context) error{
		c.addServiceAccounts, c.addNamespaces, c.addGarbageCollector, c.addSigners, c.addCertificates, c.addBootstrap,
		c.addReplicas, c.addWorkloads, c.addEndpoints, c.addClaimProtection,
	} {
		if err := add(ctx); err != nil {
			return nil, fmt.Errorf("build controller: %w", err)
		}
	}
	return c, nil
}

// start fills the caches of the controllers, and then runs every controller until ctx ends.
func (c *controllers) start(ctx context.Context) {
	c.informers.Start(ctx.Done())
	close(c.started)
	// The certificate cleaner looks at its cache once, when it starts, and then an hour later.
	c.informers.WaitForCacheSync(ctx.Done())
	for _, run := range c.run {
		go run(ctx)
	}
}

func (c *controllers) add(run func(context.Context)) { c.run = append(c.run, run) }

// addWorkers adds a controller of the usual shape.
func (c *controllers) addWorkers(run func(context.Context, int)) {
	c.add(func(ctx context.Context) { run(ctx, workers) })
}

func (c *controllers) addServiceAccounts(ctx context.Context) error {
	core := c.informers.Core().V1()
	accounts, err := serviceaccount.NewServiceAccountsController(klog.FromContext(ctx), core.ServiceAccounts(), core.Namespaces(),
		c.client, serviceaccount.DefaultServiceAccountsControllerOptions())
	if err != nil {
		return err
	}
	c.addWorkers(accounts.Run)

	rootCA, err := os.ReadFile(c.certs.crt("ca"))
	if err != nil {
		return err
	}
	key, err := keyutil.PrivateKeyFromFile(c.certs.key("sa"))
	if err != nil {
		return err
	}
	generator, err := tokens.JWTTokenGenerator(tokens.LegacyIssuer, key)
	if err != nil {
		return err
	}
	secrets, err := serviceaccount.NewTokensController(klog.FromContext(ctx), core.ServiceAccounts(), core.Secrets(), c.client,
		serviceaccount.TokensControllerOptions{TokenGenerator: generator, RootCA: rootCA})
	if err != nil {
		return err
	}
	c.addWorkers(secrets.Run)

	publisher, err := rootcacertpublisher.NewPublisher(core.ConfigMaps(), core.Namespaces(), c.client, rootCA)
	if err != nil {
		return err
	}
	c.addWorkers(publisher.Run)

	aggregation := clusterroleaggregation.NewClusterRoleAggregation(c.informers.Rbac().V1().ClusterRoles(), c.client.RbacV1())
	c.addWorkers(aggregation.Run)
	return nil
}

func (c *controllers) addGarbageCollector(ctx context.Context) error {
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.client.Discovery()))
	shared := informerfactory.NewInformerFactory(c.informers, metadatainformer.NewSharedInformerFactory(c.metadata, 0))
	collector, err := garbagecollector.NewGarbageCollector(ctx, c.client, c.metadata, mapper,
		garbagecollector.DefaultIgnoredResources(), shared, c.started)
	if err != nil {
		return err
	}
	c.add(func(ctx context.Context) { collector.Run(ctx, workers, discoveryPeriod) })
	c.add(func(ctx context.Context) { collector.Sync(ctx, c.client.Discovery(), discoveryPeriod) })
	return nil
}

func (c *controllers) addSigners(ctx context.Context) error {
	requests := c.informers.Certificates().V1().CertificateSigningRequests()
	crt, key := c.certs.crt("ca"), c.certs.key("ca")
	for _, build := range []func() (*signer.CSRSigningController, error){
		func() (*signer.CSRSigningController, error) {
			return signer.NewKubeletServingCSRSigningController(ctx, c.client, requests, crt, key, signedCertificateLife)
		},
		func() (*signer.CSRSigningController, error) {
			return signer.NewKubeletClientCSRSigningController(ctx, c.client, requests, crt, key, signedCertificateLife)
		},
		func() (*signer.CSRSigningController, error) {
			return signer.NewKubeAPIServerClientCSRSigningController(ctx, c.client, requests, crt, key, signedCertificateLife)
		},
		func() (*signer.CSRSigningController, error) {
			return signer.NewLegacyUnknownCSRSigningController(ctx, c.client, requests, crt, key, signedCertificateLife)
		},
	} {
		signing, err := build()
		if err != nil {
			return err
		}
		c.addWorkers(signing.Run)
	}
	return nil
}

func (c *controllers) addCertificates(ctx context.Context) error {
	requests := c.informers.Certificates().V1().CertificateSigningRequests()
	c.addWorkers(approver.NewCSRApprovingController(ctx, c.client, requests).Run)
	c.addWorkers(cleaner.NewCSRCleanerController(c.client.CertificatesV1().CertificateSigningRequests(), requests).Run)
	return nil
}

func (c *controllers) addBootstrap(context.Context) error {
	core := c.informers.Core().V1()
	signing, err := bootstrap.NewSigner(c.client, core.Secrets(), core.ConfigMaps(), bootstrap.DefaultSignerOptions())
	if err != nil {
		return err
	}
	c.add(signing.Run)
	cleaning, err := bootstrap.NewTokenCleaner(c.client, core.Secrets(), bootstrap.DefaultTokenCleanerOptions())
	if err != nil {
		return err
	}
	c.add(cleaning.Run)
	return nil
}

func (c *controllers) addReplicas(ctx context.Context) error {
	apps, pods := c.informers.Apps().V1(), c.informers.Core().V1().Pods()
	deployments, err := deployment.NewDeploymentController(ctx, apps.Deployments(), apps.ReplicaSets(), pods, c.client)
	if err != nil {
		return err
	}
	c.addWorkers(deployments.Run)
	c.addWorkers(replicaset.NewReplicaSetController(ctx, apps.ReplicaSets(), pods, c.client, replicaset.BurstReplicas).Run)
	return nil
}

func (c *controllers) addWorkloads(ctx context.Context) error {
	apps, core := c.informers.Apps().V1(), c.informers.Core().V1()
	sets := statefulset.NewStatefulSetController(ctx, core.Pods(), apps.StatefulSets(), core.PersistentVolumeClaims(),
		apps.ControllerRevisions(), c.client)
	c.addWorkers(sets.Run)
	daemons, err := daemon.NewDaemonSetsController(ctx, apps.DaemonSets(), apps.ControllerRevisions(), core.Pods(), core.Nodes(),
		c.client, flowcontrol.NewBackOff(time.Second, 15*time.Minute))
	if err != nil {
		return err
	}
	c.addWorkers(daemons.Run)
	// Upstream gathers the events of the pods of a Job for a second, and a sync before its cache has them waits as long.
	job.SyncJobBatchPeriod = 50 * time.Millisecond
	job.DefaultJobApiBackOff = 100 * time.Millisecond
	// Gang scheduling of jobs is behind a feature gate that is off; the controller then wants no informers for it.
	jobs, err := job.NewController(ctx, c.client, core.Pods(), c.informers.Batch().V1().Jobs(), nil, nil)
	if err != nil {
		return err
	}
	c.addWorkers(jobs.Run)
	// 12,500 is the upstream number of finished pods that may stay.
	c.add(podgc.NewPodGC(ctx, c.client, core.Pods(), core.Nodes(), 12500).Run)
	return nil
}

func (c *controllers) addEndpoints(ctx context.Context) error {
	core := c.informers.Core().V1()
	c.addWorkers(endpoint.NewEndpointController(ctx, core.Pods(), core.Services(), core.Endpoints(), c.client, 0).Run)
	slices := endpointslice.NewController(ctx, core.Pods(), core.Services(), core.Nodes(),
		c.informers.Discovery().V1().EndpointSlices(), endpointsPerSlice, c.client, 0)
	c.addWorkers(slices.Run)
	return nil
}

// addClaimProtection adds the controller that lets deleted PersistentVolumeClaims go: the API server gives each one a finalizer.
func (c *controllers) addClaimProtection(ctx context.Context) error {
	core := c.informers.Core().V1()
	protection, err := pvcprotection.NewPVCProtectionController(klog.FromContext(ctx), core.PersistentVolumeClaims(), core.Pods(), c.client)
	if err != nil {
		return err
	}
	c.addWorkers(protection.Run)
	return nil
}
