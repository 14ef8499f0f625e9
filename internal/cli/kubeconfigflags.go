package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/homedir"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/kube"
)

// kubeconfigFlags are the flags for the kubeconfig and the context of a cluster.
type kubeconfigFlags struct {
	file, context string
	// fileFlag is the name of the flag for file, for messages.
	fileFlag string
}

// load reads the kubeconfig of the flag, else the files in KUBECONFIG, else ~/.kube/config.
func (k kubeconfigFlags) load() (clientcmdapi.Config, error) {
	loaded, err := loadingRules(k.file).Load()
	if err != nil {
		return clientcmdapi.Config{}, err
	}
	if k.file != "" && isEmpty(*loaded) {
		return clientcmdapi.Config{}, fmt.Errorf("%s is empty", k.file)
	}
	return *loaded, nil
}

func isEmpty(config clientcmdapi.Config) bool {
	return len(config.Contexts) == 0 && len(config.Clusters) == 0
}

// config returns the config of a context of the loaded kubeconfigs. context is "" for the current one. If loaded is
// empty, it returns the config of the cluster in which this process runs as a pod.
func (k kubeconfigFlags) config(loaded clientcmdapi.Config, context string) (*rest.Config, error) {
	if !isEmpty(loaded) {
		// Without access to the files the client cannot write them: current-context and tokens do not change.
		return clientcmd.NewNonInteractiveClientConfig(loaded, context, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	}
	config, err := command.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, k.notFoundError()
	}
	return config, err
}

// notFoundError returns an error that lists the places where a kubeconfig was searched.
func (k kubeconfigFlags) notFoundError() error {
	home := filepath.Join(homedir.HomeDir(), clientcmd.RecommendedHomeDir, clientcmd.RecommendedFileName)
	searched := "KUBECONFIG is not set, and " + home + " does not exist"
	if files := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); files != "" {
		searched = fmt.Sprintf("no file of KUBECONFIG (%q) has a kubeconfig, and %s is not used if KUBECONFIG is set", files, home)
	}
	return fmt.Errorf("no kubeconfig found: --%s is not set; %s; this process does not run in a pod", k.fileFlag, searched)
}

// controlPlaneFlags are the flags for the kubeconfig of the hub. They have the same names as in Karmada.
type controlPlaneFlags struct {
	kubeconfigFlags
	impersonate rest.ImpersonationConfig
	verbosity   int
}

// controlPlaneUsage is the usage of --kubeconfig.
const controlPlaneUsage = "`file` with the kubeconfig of the control plane (default KUBECONFIG, then ~/.kube/config)"

// add adds the flags for the kubeconfig and its context. fileFlag is the name of the flag for the kubeconfig, and
// fileUsage its usage.
func (c *controlPlaneFlags) add(flags *pflag.FlagSet, fileFlag, fileUsage string) {
	c.fileFlag = fileFlag
	flags.StringVar(&c.file, fileFlag, "", fileUsage)
	flags.StringVar(&c.context, "karmada-context", "",
		"`context` of the control plane in that kubeconfig (default the current context)")
}

// addImpersonation adds the flags for impersonation on the control plane.
func (c *controlPlaneFlags) addImpersonation(flags *pflag.FlagSet) {
	flags.StringVar(&c.impersonate.UserName, "karmada-as", "", "`user` to impersonate on the control plane")
	flags.StringArrayVar(&c.impersonate.Groups, "karmada-as-group", nil,
		"`group` to impersonate on the control plane, with --karmada-as; repeatable")
	flags.StringVar(&c.impersonate.UID, "karmada-as-uid", "",
		"`UID` to impersonate on the control plane, with --karmada-as")
}

func (c *controlPlaneFlags) addVerbosity(flags *pflag.FlagSet) { addVerbosity(flags, &c.verbosity) }

func (c *controlPlaneFlags) validate() error {
	if c.impersonate.UserName == "" && (len(c.impersonate.Groups) > 0 || c.impersonate.UID != "") {
		return errors.New("--karmada-as-group and --karmada-as-uid need --karmada-as")
	}
	return nil
}

// restConfig returns the config of the control plane. Reads with it are cancelled when ctx ends.
func (c *controlPlaneFlags) restConfig(ctx context.Context) (*rest.Config, error) {
	loaded, err := c.load()
	if err == nil {
		var config *rest.Config
		if config, err = c.config(loaded, c.context); err == nil {
			config.Impersonate = c.impersonate
			return kube.Interruptible(ctx, config), nil
		}
	}
	return nil, fmt.Errorf("failed to get control plane rest config. context: %s, kubeconfig: %s, error: %w", c.context, c.file, err)
}

// client returns a client of the control plane.
func (c *controlPlaneFlags) client(ctx context.Context) (client.Client, error) {
	config, err := c.restConfig(ctx)
	if err != nil {
		return nil, err
	}
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the control plane: %w", err)
	}
	return hubClient, nil
}

// clusterOfContext returns the cluster entry of a context of a loaded kubeconfig. context is "" for the current one.
func clusterOfContext(loaded clientcmdapi.Config, context string) (*clientcmdapi.Cluster, error) {
	name := cmp.Or(context, loaded.CurrentContext)
	found, ok := loaded.Contexts[name]
	if !ok {
		return nil, fmt.Errorf("the kubeconfig has no context %q", name)
	}
	cluster, ok := loaded.Clusters[found.Cluster]
	if !ok {
		return nil, fmt.Errorf("the kubeconfig has no cluster %q, which context %q refers to", found.Cluster, name)
	}
	return cluster, nil
}

// caCertificates returns the CA certificates of a cluster entry, in PEM. A cluster entry without them is an error.
func caCertificates(cluster *clientcmdapi.Cluster) ([]byte, error) {
	ca := cluster.CertificateAuthorityData
	if len(ca) == 0 && cluster.CertificateAuthority != "" {
		var err error
		if ca, err = os.ReadFile(cluster.CertificateAuthority); err != nil {
			return nil, fmt.Errorf("read the CA certificates of the kubeconfig: %w", err)
		}
	}
	if len(ca) == 0 {
		return nil, errors.New("no CA certificates found in kubeconfig")
	}
	return ca, nil
}

// maxVerbosity is the maximum verbosity. At higher levels client-go logs the bodies of requests and responses, which
// contain tokens.
const maxVerbosity = 7

func addVerbosity(flags *pflag.FlagSet, level *int) {
	flags.IntVarP(level, "v", "v", 0,
		"`level` of the log on standard error: 6 for requests, 7 for requests with headers")
}

// withVerbosity returns a context with a logger of this level, and makes it the logger of all clients of this process.
// If level is 0, it only returns ctx.
func withVerbosity(ctx context.Context, level int, streams command.Streams) context.Context {
	level = min(level, maxVerbosity)
	if level <= 0 {
		return ctx
	}
	// client-go gets the verbosity from klog, and the logger from the context of a request.
	levels := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(levels)
	_ = levels.Set("v", strconv.Itoa(level)) // a number cannot fail
	// logr's V(n) is slog's level -n.
	logger := logr.FromSlogHandler(slog.NewTextHandler(streams.Err, &slog.HandlerOptions{Level: slog.Level(-level)}))
	klog.SetLogger(logger)
	log.SetLogger(logger)
	return log.IntoContext(ctx, logger)
}
