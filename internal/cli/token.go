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
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
)

func newToken(streams Streams) *cobra.Command {
	cmd := parent("token", "Make, list and delete the tokens with which clusters register in pull mode",
		newTokenCreate(streams), newTokenList(streams), newTokenDelete(streams))
	cmd.Long = `Make, list and delete the tokens with which clusters register in pull mode.

They are bootstrap tokens of Kubernetes, Secrets in namespace kube-system of the control plane. A token is worth one registration, and nothing else: it may
ask for one certificate, which is given for the cluster that asks first.`
	return cmd
}

// tokenCreateFlags are the flags of `token create`.
type tokenCreateFlags struct {
	hub     controlPlane
	options bootstrap.TokenOptions
	print   bool
}

func newTokenCreate(streams Streams) *cobra.Command {
	f := &tokenCreateFlags{}
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Make a token, and print it or the command that registers a cluster with it",
		Long: `Make a token, and print it or, with --print-register-command, the command that registers a cluster with it: one line, to be run where the cluster's
kubeconfig is. Its address is that of the control plane in the kubeconfig of this command, which must be one that the cluster reaches.

A token with --cluster-name gives a registered cluster a new certificate, when that of its agent has expired.`,
		Example: `  karmadactl token create --print-register-command --kubeconfig=/etc/karmada/karmada-apiserver.config

  # for a week, with a note
  karmadactl token create --ttl=168h --description="for the shops in Rome"

  # for the agent of a cluster whose certificate has expired
  karmadactl token create --cluster-name=member3 --print-register-command`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.validate(); err != nil {
				return err
			}
			if err := streams.open(); err != nil {
				return err
			}
			return f.run(withVerbosity(cmd.Context(), f.hub.verbosity, streams), streams, cmd.Root().CommandPath())
		},
	}
	flags := cmd.Flags()
	f.hub.add(flags, "kubeconfig")
	flags.BoolVar(&f.print, "print-register-command", false, "print the whole register command, and not the token alone")
	flags.DurationVar(&f.options.TTL, "ttl", bootstrap.DefaultTokenLife, "how long the token lives; 0 for ever")
	flags.StringSliceVar(&f.options.Usages, "usages", bootstrap.DefaultUsages(), "`usages` of the token: signing lets clusters verify the control plane with it, authentication lets them log in")
	flags.StringSliceVar(&f.options.Groups, "groups", []string{bootstrap.DefaultGroup}, "`groups` of whoever logs in with the token, beside system:bootstrappers")
	flags.StringVar(&f.options.Description, "description", "", "what the token is for, for people")
	flags.StringVar(&f.options.Cluster, "cluster-name", "", "`name` of a registered cluster: the token gives its agent a new certificate, and registers nothing")
	return cmd
}

func (f *tokenCreateFlags) validate() error {
	if f.options.TTL < 0 {
		return fmt.Errorf("--ttl: %s is less than nothing", f.options.TTL)
	}
	if f.options.Cluster != "" {
		if err := karmada.ValidateName(f.options.Cluster); err != nil {
			return fmt.Errorf("--cluster-name: %w", err)
		}
	}
	return nil
}

func (f *tokenCreateFlags) run(ctx context.Context, streams Streams, program string) error {
	line := ""
	if f.print {
		var err error
		// Whoever cannot print the command has no use for the token.
		if line, err = f.registerCommand(program); err != nil {
			return fmt.Errorf("failed to get register command, err: %w", err)
		}
	}
	hub, err := f.hub.client(ctx)
	if err != nil {
		return err
	}
	token, err := f.make(ctx, streams, hub)
	if err != nil {
		return err
	}
	text := token.String()
	if f.print {
		text = strings.Replace(line, tokenMark, text, 1)
	}
	if _, err := fmt.Fprintln(streams.Out, text); err != nil {
		// Nobody knows it, then.
		_, undone := bootstrap.DeleteToken(context.WithoutCancel(ctx), hub, token.ID)
		return errors.Join(fmt.Errorf("print the token: %w", err), undone)
	}
	return nil
}

func (f *tokenCreateFlags) make(ctx context.Context, streams Streams, hub client.Client) (bootstrap.Token, error) {
	defer progress(streams, "making a token on the control plane")()
	return bootstrap.CreateToken(ctx, hub, f.options)
}

// tokenMark stands for the token in a register command.
const tokenMark = "\x00"

// registerCommand returns the command that registers a cluster, with tokenMark in place of the token.
func (f *tokenCreateFlags) registerCommand(program string) (string, error) {
	loaded, err := f.hub.load()
	if err != nil {
		return "", err
	}
	if isEmpty(loaded) {
		return "", f.hub.nowhere()
	}
	cluster, err := inForce(loaded, f.hub.context)
	if err != nil {
		return "", fmt.Errorf("failed to get default cluster config: %w", err)
	}
	endpoint, err := endpointOf(cluster.Server)
	if err != nil {
		return "", err
	}
	ca, err := authorities(cluster)
	if err != nil {
		return "", err
	}
	pins, err := bootstrap.Pins(ca)
	if err != nil {
		return "", err
	}
	line := fmt.Sprintf("%s register %s --token %s --discovery-token-ca-cert-hash %s", program, endpoint, tokenMark, strings.Join(pins, ","))
	if f.options.Cluster != "" {
		line += fmt.Sprintf(" --cluster-name %s --renew", f.options.Cluster)
	}
	return line, nil
}

// endpointOf returns the address of a server without its scheme.
func endpointOf(server string) (string, error) {
	address, err := url.Parse(server)
	if err != nil || address.Scheme != "https" || address.Host == "" || strings.Trim(address.Path, "/") != "" {
		return "", fmt.Errorf("the server %q of the kubeconfig is not https://<host>:<port>", server)
	}
	return address.Host, nil
}

func newTokenList(streams Streams) *cobra.Command {
	hub, output := &controlPlane{}, ""
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the bootstrap tokens of the control plane",
		Example: "  karmadactl token list --kubeconfig=/etc/karmada/karmada-apiserver.config",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := validateOutput(output); err != nil {
				return err
			}
			ctx := withVerbosity(cmd.Context(), hub.verbosity, streams)
			hubClient, err := hub.client(ctx)
			if err != nil {
				return err
			}
			doing := startTalk(streams, "listing the tokens of the control plane")
			tokens, err := bootstrap.ListTokens(ctx, hubClient, func(warning string) { doing.line("warning: " + warning) })
			doing.done()
			if err != nil {
				return err
			}
			if output == outputJSON {
				return printJSON(streams.Out, tokenRows(tokens))
			}
			return printTokens(streams.Out, tokens, time.Now())
		},
	}
	hub.add(cmd.Flags(), "kubeconfig")
	outputFlag(cmd, &output)
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

// printTokens prints the table that people know from kubeadm.
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
			token.String(), ttl, expires, orNone(strings.Join(token.Usages, ",")), orNone(token.Description), orNone(strings.Join(token.Groups, ",")),
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

func newTokenDelete(streams Streams) *cobra.Command {
	hub := &controlPlane{}
	cmd := &cobra.Command{
		Use:   "delete TOKEN_OR_ID...",
		Short: "Delete bootstrap tokens, by their id or whole",
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
			defer progress(streams, "deleting tokens on the control plane")()
			return deleteTokens(ctx, hubClient, args, streams.Out)
		},
	}
	hub.add(cmd.Flags(), "kubeconfig")
	return cmd
}

// deleteTokens deletes them one after the other, and stops at the first failure.
func deleteTokens(ctx context.Context, hub client.Client, tokens []string, out io.Writer) error {
	for _, token := range tokens {
		id, err := bootstrap.DeleteToken(ctx, hub, token)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "bootstrap token %q deleted\n", id); err != nil {
			return err
		}
	}
	return nil
}
