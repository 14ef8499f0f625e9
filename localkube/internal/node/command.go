package node

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/api/v1/resource"
	"k8s.io/kubernetes/pkg/fieldpath"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
	"k8s.io/utils/ptr"
)

// command returns the process to run for the container: the program, under the name command[0], with the rest of command and with args.
func (c *container) command() (*exec.Cmd, error) {
	if err := os.MkdirAll(c.pod.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of pod: %w", err)
	}
	variables := map[string]string{
		"PATH":     os.Getenv("PATH"),
		"HOME":     c.pod.dir,
		"HOSTNAME": c.pod.object.Name,

		"KUBERNETES_SERVICE_HOST":       c.pod.node.Host,
		"KUBERNETES_SERVICE_PORT":       c.pod.node.Port,
		"KUBERNETES_SERVICE_PORT_HTTPS": c.pod.node.Port,
	}
	if c.mountsCredentials() {
		dir, err := c.pod.serviceAccountDir()
		if err != nil {
			return nil, err
		}
		variables[ServiceAccountDirVariable] = dir
	}
	if err := c.environment(c.pod.ctx, variables); err != nil {
		return nil, err
	}
	expand := expansion.MappingFuncFor(variables)
	args := []string{c.program}
	if len(c.spec.Command) > 0 {
		args = nil
	}
	for _, word := range slices.Concat(c.spec.Command, c.spec.Args) {
		args = append(args, expansion.Expand(word, expand))
	}
	cmd := &exec.Cmd{Path: c.program, Args: args, Dir: c.pod.dir}
	for _, name := range slices.Sorted(maps.Keys(variables)) {
		cmd.Env = append(cmd.Env, name+"="+variables[name])
	}
	return cmd, nil
}

// openLog opens the file that the container's output goes to. It outlives the pod.
func (c *container) openLog() (*os.File, error) {
	object := c.pod.object
	name := fmt.Sprintf("%s_%s_%s.log", object.Namespace, object.Name, c.spec.Name)
	log, err := os.OpenFile(filepath.Join(c.pod.node.Dir, "pods", name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return log, nil
}

// podDir is where the pod's processes run and find their credentials.
func podDir(dir string, object *corev1.Pod) string {
	return filepath.Join(dir, "pods", fmt.Sprintf("%s_%s_%s", object.Namespace, object.Name, object.UID))
}

// environment adds to variables what the container's envFrom and env say, later ones over earlier ones.
func (c *container) environment(ctx context.Context, variables map[string]string) error {
	for _, from := range c.spec.EnvFrom {
		values, err := c.source(ctx, from)
		if err != nil {
			return err
		}
		for name, value := range values {
			variables[from.Prefix+name] = value
		}
	}
	for _, variable := range c.spec.Env {
		value, ok, err := c.value(ctx, variable, variables)
		if err != nil {
			return fmt.Errorf("find value of variable %s: %w", variable.Name, err)
		}
		if ok {
			variables[variable.Name] = value
		}
	}
	return nil
}

func (c *container) source(ctx context.Context, from corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.ConfigMapRef != nil:
		values, err := c.configMap(ctx, from.ConfigMapRef.Name)
		return optional(from.ConfigMapRef.Optional, values, err)
	case from.SecretRef != nil:
		values, err := c.secret(ctx, from.SecretRef.Name)
		return optional(from.SecretRef.Optional, values, err)
	default:
		return map[string]string{}, nil
	}
}

// value returns the value of a variable; ok is false if it comes from an optional place that does not exist.
func (c *container) value(ctx context.Context, variable corev1.EnvVar, known map[string]string) (value string, ok bool, err error) {
	from := variable.ValueFrom
	switch {
	case from == nil:
		return expansion.Expand(variable.Value, expansion.MappingFuncFor(known)), true, nil
	case from.FieldRef != nil:
		value, err = c.pod.field(from.FieldRef.FieldPath)
		return value, true, err
	case from.ResourceFieldRef != nil:
		value, err = c.resource(from.ResourceFieldRef)
		return value, true, err
	case from.ConfigMapKeyRef != nil:
		values, err := c.configMap(ctx, from.ConfigMapKeyRef.Name)
		return key(from.ConfigMapKeyRef.Key, from.ConfigMapKeyRef.Optional, values, err)
	case from.SecretKeyRef != nil:
		values, err := c.secret(ctx, from.SecretKeyRef.Name)
		return key(from.SecretKeyRef.Key, from.SecretKeyRef.Optional, values, err)
	default:
		return "", false, fmt.Errorf("its kind of source is not supported")
	}
}

// field returns what a fieldRef points at. The addresses are those where a process is really found.
func (p *pod) field(path string) (string, error) {
	switch path {
	case "spec.nodeName":
		return p.node.Name, nil
	case "spec.serviceAccountName":
		return p.object.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs", "status.hostIP", "status.hostIPs":
		return "127.0.0.1", nil
	default:
		return fieldpath.ExtractFieldPathAsString(p.object, path)
	}
}

// resource returns what a resourceFieldRef points at; a limit that is not set is what the node has.
func (c *container) resource(ref *corev1.ResourceFieldSelector) (string, error) {
	target := c.spec
	for _, other := range slices.Concat(c.pod.object.Spec.InitContainers, c.pod.object.Spec.Containers) {
		if other.Name == ref.ContainerName {
			target = &other
		}
	}
	target = target.DeepCopy()
	resource.MergeContainerResourceLimits(target, c.pod.node.status().Allocatable)
	return resource.ExtractContainerResourceValue(ref, target)
}

func (c *container) configMap(ctx context.Context, name string) (map[string]string, error) {
	object, err := c.pod.node.Client.CoreV1().ConfigMaps(c.pod.object.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return object.Data, nil
}

func (c *container) secret(ctx context.Context, name string) (map[string]string, error) {
	object, err := c.pod.node.Client.CoreV1().Secrets(c.pod.object.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	values := map[string]string{}
	for key, value := range object.Data {
		values[key] = string(value)
	}
	return values, nil
}

// optional turns "not found" into nothing if that is allowed.
func optional(allowed *bool, values map[string]string, err error) (map[string]string, error) {
	if apierrors.IsNotFound(err) && ptr.Deref(allowed, false) {
		return map[string]string{}, nil
	}
	return values, err
}

func key(name string, allowed *bool, values map[string]string, err error) (string, bool, error) {
	values, err = optional(allowed, values, err)
	if err != nil {
		return "", false, err
	}
	value, ok := values[name]
	if !ok && !ptr.Deref(allowed, false) {
		return "", false, fmt.Errorf("there is no key %q", name)
	}
	return value, ok, nil
}
