package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
)

func newToken(streams command.Streams) *cobra.Command {
	cmd := command.NewParent("token", "Manage bootstrap tokens",
		newTokenCreate(streams), newTokenList(streams), newTokenDelete(streams))
	cmd.Long = `Manage the bootstrap tokens with which clusters register in pull mode. They are Secrets in
namespace kube-system of the control plane. A token is valid for the registration of one cluster.`
	return cmd
}

// tokenCreateFlags are the flags of `token create`.
type tokenCreateFlags struct {
	hub          controlPlaneFlags
	options      bootstrap.TokenOptions
	printCommand bool
}

func newTokenCreate(streams command.Streams) *cobra.Command {
	f := &tokenCreateFlags{}
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a bootstrap token and print it",
		Long: `Create a bootstrap token and print it, or print the register command with it. The register command
runs with the kubeconfig of the cluster. It contains the address of the control plane, from the
kubeconfig of token create. The cluster must be able to connect to that address.`,
		Example: `  karmadactl token create --print-register-command \
      --kubeconfig=/etc/karmada/karmada-apiserver.config

  # create a token for a week, with a description
  karmadactl token create --ttl=168h --description="for the shops in Rome"

  # renew the expired certificate of the agent of a cluster
  karmadactl token create --cluster-name=member3 --print-register-command`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(); err != nil {
				return err
			}
			if err := streams.RequireOpen(); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams, cmd.Root().CommandPath())
		},
	}
	command.AddSection(cmd.Flags(), "Token flags:", f.addToken)
	addTokenFlags(cmd.Flags(), &f.hub)
	return cmd
}

// addToken adds the flags for the new token.
func (f *tokenCreateFlags) addToken(flags *pflag.FlagSet) {
	flags.BoolVar(&f.printCommand, "print-register-command", false,
		"print the register command instead of the token alone")
	flags.DurationVar(&f.options.TTL, "ttl", bootstrap.DefaultTokenTTL, "lifetime of the token; 0 never expires")
	flags.StringSliceVar(&f.options.Usages, "usages", []string{"signing", "authentication"},
		"`usages` of the token: signing to verify the control plane, authentication to log in")
	flags.StringSliceVar(&f.options.Groups, "groups", []string{bootstrap.DefaultTokenGroup},
		"`groups` of clients with the token, in addition to system:bootstrappers")
	flags.StringVar(&f.options.Description, "description", "", "`description` of the token for users")
	flags.StringVar(&f.options.Cluster, "cluster-name", "",
		"`name` of a registered cluster; the token is valid for a new certificate of its agent only")
}

// addTokenFlags adds the flags of all token commands.
func addTokenFlags(flags *pflag.FlagSet, hub *controlPlaneFlags) {
	command.AddSection(flags, command.SectionControlPlane, func(flags *pflag.FlagSet) {
		hub.add(flags,
			"kubeconfig", controlPlaneUsage)
	})
	command.AddSection(flags, command.SectionGlobal, hub.addVerbosity)
}

func (f *tokenCreateFlags) validate() error {
	if f.options.TTL < 0 {
		return fmt.Errorf("--ttl: %s must not be negative", f.options.TTL)
	}
	if f.options.Cluster != "" {
		if err := karmada.ValidateName(f.options.Cluster); err != nil {
			return fmt.Errorf("--cluster-name: %w", err)
		}
	}
	return nil
}

func (f *tokenCreateFlags) run(ctx context.Context, streams command.Streams, program string) error {
	output := tokenPlaceholder
	if f.printCommand {
		var err error
		// The token is created only if the command can be printed.
		if output, err = f.registerCommand(program); err != nil {
			return fmt.Errorf("failed to get register command, err: %w", err)
		}
	}
	hubClient, err := f.hub.client(ctx)
	if err != nil {
		return err
	}
	progress := startProgress(streams, "creating a token on the control plane")
	token, err := bootstrap.CreateToken(ctx, hubClient, f.options)
	progress.stop()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(streams.Out, strings.Replace(output, tokenPlaceholder, token.String(), 1)); err != nil {
		// No one can use a token that was not printed.
		_, deleteErr := bootstrap.DeleteToken(context.WithoutCancel(ctx), hubClient, token.ID)
		return errors.Join(fmt.Errorf("print the token: %w", err), deleteErr)
	}
	return nil
}

// tokenPlaceholder stands for the token in the output before the token exists. No other part of the output contains it.
const tokenPlaceholder = "\x00"

// registerCommand returns the command that registers a cluster, with tokenPlaceholder in place of the token. program is
// the name under which the user has called this program.
func (f *tokenCreateFlags) registerCommand(program string) (string, error) {
	loaded, err := f.hub.load()
	if err != nil {
		return "", err
	}
	if isEmpty(loaded) {
		return "", f.hub.notFoundError()
	}
	cluster, err := clusterOfContext(loaded, f.hub.context)
	if err != nil {
		return "", fmt.Errorf("failed to get default cluster config: %w", err)
	}
	endpoint, err := endpointOf(cluster.Server)
	if err != nil {
		return "", err
	}
	ca, err := caCertificates(cluster)
	if err != nil {
		return "", err
	}
	pins, err := bootstrap.Pins(ca)
	if err != nil {
		return "", err
	}
	command := fmt.Sprintf("%s register %s --token %s --discovery-token-ca-cert-hash %s",
		program, endpoint, tokenPlaceholder, strings.Join(pins, ","))
	if f.options.Cluster != "" {
		command += fmt.Sprintf(" --cluster-name %s --renew", f.options.Cluster)
	}
	return command, nil
}

// endpointOf returns the host and port of a server, which must be an https URL without a path.
func endpointOf(server string) (string, error) {
	address, err := url.Parse(server)
	if err != nil || address.Scheme != "https" || address.Host == "" || strings.Trim(address.Path, "/") != "" {
		return "", fmt.Errorf("the server %q of the kubeconfig is not https://<host>:<port>", server)
	}
	return address.Host, nil
}

func newTokenList(streams command.Streams) *cobra.Command {
	hub, output := &controlPlaneFlags{}, ""
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the bootstrap tokens of the control plane",
		Example: "  karmadactl token list --kubeconfig=/etc/karmada/karmada-apiserver.config",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := command.ValidateOutput(output); err != nil {
				return err
			}
			ctx := withVerbosity(cmd.Context(), hub.verbosity, streams)
			hubClient, err := hub.client(ctx)
			if err != nil {
				return err
			}
			progress := startProgress(streams, "listing the tokens of the control plane")
			tokens, err := bootstrap.ListTokens(ctx, hubClient, func(warning string) { progress.printLine("warning: " + warning) })
			progress.stop()
			if err != nil {
				return err
			}
			if output == command.OutputJSON {
				return command.PrintJSON(streams.Out, tokenRows(tokens))
			}
			return printTokens(streams.Out, tokens, time.Now())
		},
	}
	command.AddSection(cmd.Flags(), command.SectionOther, func(flags *pflag.FlagSet) { command.AddOutput(flags, &output) })
	addTokenFlags(cmd.Flags(), hub)
	return cmd
}

// tokenRow is a token in JSON.
type tokenRow struct {
	Token       string     `json:"token"`
	Expires     *time.Time `json:"expires,omitempty"`
	Usages      []string   `json:"usages,omitempty"`
	Groups      []string   `json:"groups,omitempty"`
	Description string     `json:"description,omitempty"`
}

func tokenRows(tokens []bootstrap.Token) []tokenRow {
	rows := make([]tokenRow, 0, len(tokens))
	for _, token := range tokens {
		row := tokenRow{Token: token.String(), Usages: token.Usages, Groups: token.Groups, Description: token.Description}
		if !token.Expires.IsZero() {
			row.Expires = &token.Expires
		}
		rows = append(rows, row)
	}
	return rows
}

// printTokens prints a table like the one of kubeadm.
func printTokens(out io.Writer, tokens []bootstrap.Token, now time.Time) error {
	const width, tab, padding = 10, 4, 3
	table := tabwriter.NewWriter(out, width, tab, padding, ' ', 0)
	lines := []string{"TOKEN\tTTL\tEXPIRES\tUSAGES\tDESCRIPTION\tEXTRA GROUPS"}
	for _, token := range tokens {
		ttl, expires := "<forever>", "<never>"
		if !token.Expires.IsZero() {
			ttl, expires = duration.ShortHumanDuration(token.Expires.Sub(now)), token.Expires.Format(time.RFC3339)
		}
		lines = append(lines, strings.Join([]string{
			token.String(), ttl, expires, orNone(strings.Join(token.Usages, ",")), orNone(token.Description),
			orNone(strings.Join(token.Groups, ",")),
		}, "\t"))
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(table, line); err != nil {
			return fmt.Errorf("print the tokens: %w", err)
		}
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("print the tokens: %w", err)
	}
	return nil
}

func orNone(text string) string { return cmp.Or(text, "<none>") }

func newTokenDelete(streams command.Streams) *cobra.Command {
	hub := &controlPlaneFlags{}
	cmd := &cobra.Command{
		Use:   "delete TOKEN_OR_ID...",
		Short: "Delete bootstrap tokens of the control plane",
		Example: `  karmadactl token delete t2jgtm
  karmadactl token delete t2jgtm.9nybj0526mjw1jbf`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New(`missing subcommand; 'token delete' is missing token of form "[a-z0-9]{6}" or "[a-z0-9]{6}.[a-z0-9]{16}"`)
			}
			ctx := withVerbosity(cmd.Context(), hub.verbosity, streams)
			hubClient, err := hub.client(ctx)
			if err != nil {
				return err
			}
			defer startProgress(streams, "deleting tokens on the control plane").stop()
			return deleteTokens(ctx, hubClient, args, streams.Out)
		},
	}
	addTokenFlags(cmd.Flags(), hub)
	return cmd
}

// deleteTokens deletes tokens in order, up to the first failure.
func deleteTokens(ctx context.Context, hubClient client.Client, tokens []string, out io.Writer) error {
	for _, token := range tokens {
		id, err := bootstrap.DeleteToken(ctx, hubClient, token)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "bootstrap token %q deleted\n", id); err != nil {
			return err
		}
	}
	return nil
}
