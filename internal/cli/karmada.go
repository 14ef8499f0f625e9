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

	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

// whereabouts is where a cluster is to be found: a context of a kubeconfig, as the flags of a command name it.
type whereabouts struct {
	file, context string
	// fileFlag is the flag of file, for messages.
	fileFlag string
}

// load reads the kubeconfig of the flag, else those of KUBECONFIG, else ~/.kube/config. Files are only read.
func (w whereabouts) load() (clientcmdapi.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	// Migrating would write a file.
	rules.MigrationRules = nil
	if w.file != "" {
		rules = &clientcmd.ClientConfigLoadingRules{ExplicitPath: w.file}
	}
	loaded, err := rules.Load()
	if err != nil {
		return clientcmdapi.Config{}, err
	}
	if w.file != "" && isEmpty(*loaded) {
		return clientcmdapi.Config{}, fmt.Errorf("%s is empty", w.file)
	}
	return *loaded, nil
}

func isEmpty(config clientcmdapi.Config) bool {
	return len(config.Contexts) == 0 && len(config.Clusters) == 0
}

// config finds the way to the cluster: that of a context of the loaded kubeconfigs ("" for the current one), or where there is no kubeconfig the
// cluster that this runs in.
func (w whereabouts) config(loaded clientcmdapi.Config, context string) (*rest.Config, error) {
	if !isEmpty(loaded) {
		// Without access to the files nothing can be kept in them: current-context stays, and so do tokens.
		return clientcmd.NewNonInteractiveClientConfig(loaded, context, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	}
	config, err := inCluster()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, w.nowhere()
	}
	return config, err
}

// nowhere says where no kubeconfig is.
func (w whereabouts) nowhere() error {
	home := filepath.Join(homedir.HomeDir(), clientcmd.RecommendedHomeDir, clientcmd.RecommendedFileName)
	variable := "KUBECONFIG is not set, and " + home + " is not there"
	if files := os.Getenv(clientcmd.RecommendedConfigPathEnvVar); files != "" {
		variable = fmt.Sprintf("KUBECONFIG is %q, where none is, and is taken in place of %s", files, home)
	}
	return fmt.Errorf("no kubeconfig is found: --%s is not given; %s; and this does not run in a pod", w.fileFlag, variable)
}

// controlPlane are the flags that say where the hub is, in the words of Karmada.
type controlPlane struct {
	whereabouts
	impersonate rest.ImpersonationConfig
	verbosity   int
}

// add adds the flags; fileFlag is the name of the one with the kubeconfig.
func (c *controlPlane) add(flags *pflag.FlagSet, fileFlag string) {
	c.fileFlag = fileFlag
	flags.StringVar(&c.file, fileFlag, "", "`file` with the kubeconfig of the control plane (default: KUBECONFIG, then ~/.kube/config)")
	flags.StringVar(&c.context, "karmada-context", "", "`context` of the control plane in that kubeconfig (default: the current one)")
	addVerbosity(flags, &c.verbosity)
}

// addImpersonation adds the flags for acting as somebody else.
func (c *controlPlane) addImpersonation(flags *pflag.FlagSet) {
	flags.StringVar(&c.impersonate.UserName, "karmada-as", "", "`user` to act as on the control plane")
	flags.StringArrayVar(&c.impersonate.Groups, "karmada-as-group", nil, "`group` to act as on the control plane, beside --karmada-as; repeatable")
	flags.StringVar(&c.impersonate.UID, "karmada-as-uid", "", "`uid` to act as on the control plane, beside --karmada-as")
}

func (c *controlPlane) validate() error {
	if c.impersonate.UserName == "" && (len(c.impersonate.Groups) > 0 || c.impersonate.UID != "") {
		return errors.New("--karmada-as-group and --karmada-as-uid need --karmada-as")
	}
	return nil
}

// hub finds the way to the control plane.
func (c *controlPlane) hub(ctx context.Context) (*rest.Config, error) {
	loaded, err := c.load()
	if err == nil {
		var config *rest.Config
		if config, err = c.config(loaded, c.context); err == nil {
			config.Impersonate = c.impersonate
			return register.Interruptible(ctx, config), nil
		}
	}
	return nil, fmt.Errorf("failed to get control plane rest config. context: %s, kubeconfig: %s, error: %w", c.context, c.file, err)
}

// client connects to the control plane.
func (c *controlPlane) client(ctx context.Context) (client.Client, error) {
	config, err := c.hub(ctx)
	if err != nil {
		return nil, err
	}
	hub, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the control plane: %w", err)
	}
	return hub, nil
}

// inForce returns the cluster of a context of a loaded kubeconfig, "" for the current one.
func inForce(loaded clientcmdapi.Config, context string) (*clientcmdapi.Cluster, error) {
	name := cmp.Or(context, loaded.CurrentContext)
	found, ok := loaded.Contexts[name]
	if !ok {
		return nil, fmt.Errorf("the kubeconfig has no context %q", name)
	}
	cluster, ok := loaded.Clusters[found.Cluster]
	if !ok {
		return nil, fmt.Errorf("the kubeconfig has no cluster %q, which context %q names", found.Cluster, name)
	}
	return cluster, nil
}

// authorities returns the certificates of the authorities that may vouch for a cluster, in PEM.
func authorities(cluster *clientcmdapi.Cluster) ([]byte, error) {
	ca := cluster.CertificateAuthorityData
	if len(ca) == 0 && cluster.CertificateAuthority != "" {
		var err error
		if ca, err = os.ReadFile(cluster.CertificateAuthority); err != nil {
			return nil, fmt.Errorf("read the certificate authority of the kubeconfig: %w", err)
		}
	}
	if len(ca) == 0 {
		return nil, errors.New("no CA certificates found in kubeconfig")
	}
	return ca, nil
}

// loudest is the highest level that is obeyed: from the next one on, clients log the content of requests and answers, tokens among it.
const loudest = 7

func addVerbosity(flags *pflag.FlagSet, level *int) {
	flags.IntVarP(level, "v", "v", 0, "`level` of the log on standard error: at 6 every request, at 7 with its headers; higher levels say no more")
}

// withVerbosity lets the clients of this process log, if level is above 0.
func withVerbosity(ctx context.Context, level int, streams Streams) context.Context {
	level = min(level, loudest)
	if level <= 0 {
		return ctx
	}
	// Clients ask klog for its level, and then log to their context.
	levels := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(levels)
	_ = levels.Set("v", strconv.Itoa(level)) // it is a number
	// logr's V(n) is slog's level -n.
	logger := logr.FromSlogHandler(slog.NewTextHandler(streams.Err, &slog.HandlerOptions{Level: slog.Level(-level)}))
	klog.SetLogger(logger)
	log.SetLogger(logger)
	return log.IntoContext(ctx, logger)
}
