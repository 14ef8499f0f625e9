package render

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// renderFunction is the name of the function in the sandbox that renders a chart. renderLimit is its time limit, which
// includes all calls of lookup.
const (
	renderFunction = "render"
	renderLimit    = 30 * time.Second
)

// SandboxFunctions returns the functions for the children of the sandbox that Charts, Changer, KustomizationRenderer
// and source.TemplateContext use.
func SandboxFunctions() map[string]sandbox.Function {
	functions := source.SandboxFunctions()
	functions[renderFunction], functions[patchFunction], functions[buildFunction] = renderInSandbox, patchInSandbox, buildInSandbox
	return functions
}

// renderInput is the input of renderFunction.
type renderInput struct {
	Request ChartRequest
	// Archive is the archive of the chart.
	Archive []byte
	// RecordsAPIs is true if the child must record the arguments of Has in ChartRequest.checkedAPIs.
	RecordsAPIs bool
	// Member is nil for a rendering for all members.
	Member *memberInputs
}

// memberInputs are the inputs of a rendering for one member, see newMemberFunctions. Inputs identifies the chart, the
// values, the options and the LookupAccount.
type memberInputs struct {
	Stored    Generated
	HasLookup bool
	Inputs    string
}

// renderOutput is the output of renderFunction: a Release with its unexported fields.
type renderOutput struct {
	Objects                    json.RawMessage
	Paths                      []string
	Chart, Defaults            json.RawMessage
	Notes                      string
	Generated                  Generated
	Unanswered, MemberSpecific bool
	IsTransient, NeedsMember   bool
	CheckedAPIs                checkedAPIs
}

// renderUncached renders a chart in the sandbox or, without a sandbox, in this process.
func (c *Charts) renderUncached(request ChartRequest, member *memberInputs) (Release, error) {
	if c.sandbox == nil {
		return request.render(request.functionsFor(member, request.Lookup))
	}
	key, err := request.key()
	if err != nil {
		return Release{}, err
	}
	if member != nil {
		// After a limit was exceeded, the sandbox rejects the key. The objects of one member must not stop renderings for
		// other members.
		key += " " + request.Owner
	}
	file, err := os.Stat(request.Chart.Path)
	if err != nil {
		return Release{}, fmt.Errorf("load chart %s %s: %w", request.Chart.Name, request.Chart.Version, err)
	}
	var rendered renderOutput
	call := sandbox.Call{
		Function: renderFunction, Scope: request.Scope, Key: renderFunction + " " + key, Limit: renderLimit,
		Load: func() (any, error) {
			archive, err := os.ReadFile(request.Chart.Path)
			if err != nil {
				return nil, fmt.Errorf("load chart %s %s: %w", request.Chart.Name, request.Chart.Version, err)
			}
			return renderInput{Request: request, Archive: archive, RecordsAPIs: request.checkedAPIs != nil, Member: member}, nil
		},
		LoadSize: int(file.Size()), Output: &rendered, Memory: request.Memory, IsCallbackSlow: true,
	}
	if member != nil && member.HasLookup {
		call.Callback = func(input json.RawMessage) (any, error) {
			var call [4]string
			if err := json.Unmarshal(input, &call); err != nil {
				return nil, err
			}
			return request.Lookup(call[0], call[1], call[2], call[3])
		}
	}
	err = c.sandbox.Call(call)
	release, decodeErr := rendered.decode(request.Memory)
	if err != nil {
		return release, err
	}
	return release, decodeErr
}

// renderInSandbox is renderFunction in a child of the sandbox.
func renderInSandbox(input json.RawMessage, callBack func(any) (json.RawMessage, error)) (any, error) {
	var r renderInput
	if err := json.Unmarshal(input, &r); err != nil {
		return nil, err
	}
	r.Request.archive = r.Archive
	if r.RecordsAPIs {
		r.Request.checkedAPIs = checkedAPIs{}
	}
	var lookup LookupFunc
	if r.Member != nil && r.Member.HasLookup {
		lookup = func(apiVersion, kind, namespace, name string) (map[string]any, error) {
			raw, err := callBack([4]string{apiVersion, kind, namespace, name})
			if err != nil {
				return nil, err
			}
			var found map[string]any
			err = kubejson.Unmarshal(raw, &found) // integers stay integers
			return found, err
		}
	}
	release, err := r.Request.render(r.Request.functionsFor(r.Member, lookup))
	encoded, encodeErr := encodeRelease(release)
	if err != nil {
		return encoded, err
	}
	return encoded, encodeErr
}

// functionsFor returns the template functions of a rendering for member or, if member is nil, for all members.
func (r ChartRequest) functionsFor(member *memberInputs, lookup LookupFunc) *templateFunctions {
	if member == nil {
		return newSharedFunctions()
	}
	return newMemberFunctions(member.Stored, lookup, member.Inputs, r.IsUpgrade)
}

func encodeRelease(r Release) (renderOutput, error) {
	objects := make([]map[string]any, 0, len(r.Objects))
	for _, object := range r.Objects {
		objects = append(objects, object.Object)
	}
	raw, err := json.Marshal(objects)
	if err != nil {
		return renderOutput{}, fmt.Errorf("encode the objects: %w", err)
	}
	return renderOutput{
		Objects: raw, Paths: r.Paths, Chart: r.Chart, Defaults: r.Defaults, Notes: r.Notes, Generated: r.Generated,
		Unanswered: r.Unanswered, MemberSpecific: r.MemberSpecific, IsTransient: r.IsTransient,
		NeedsMember: r.needsMember, CheckedAPIs: r.checkedAPIs,
	}, nil
}

// decode returns the Release, and reserves memory for its objects.
func (r renderOutput) decode(reserved *kube.ContentReservation) (Release, error) {
	release := Release{
		Paths: r.Paths, Chart: r.Chart, Defaults: r.Defaults, Notes: r.Notes, Generated: r.Generated,
		Unanswered: r.Unanswered, MemberSpecific: r.MemberSpecific, IsTransient: r.IsTransient,
		needsMember: r.NeedsMember, checkedAPIs: r.CheckedAPIs,
	}
	if err := r.CheckedAPIs.checkLimits(); err != nil {
		return Release{}, err
	}
	if len(r.Objects) == 0 {
		return release, nil
	}
	var err error
	if release.Objects, release.Documents, err = decodeObjects(r.Objects, reserved); err != nil {
		return Release{}, err
	}
	if len(r.Paths) != len(release.Objects) {
		return Release{}, fmt.Errorf("the sandbox returned %d paths of %d objects", len(r.Paths), len(release.Objects))
	}
	return release, nil
}

// decodeObjects decodes the objects that a child returned, and reserves memory for them. A compromised child can return
// anything, which must not end this process.
func decodeObjects(raw json.RawMessage, reserved *kube.ContentReservation) ([]*unstructured.Unstructured, *kube.Documents, error) {
	needed := kube.MemoryOf(raw, kube.TypeUnstructured)
	if err := reserved.Add(needed); err != nil {
		return nil, nil, err
	}
	objects, err := unmarshalObjects(raw)
	if err != nil {
		reserved.Subtract(needed)
		return nil, nil, err
	}
	documents := kube.NewDocuments(objects)
	if err := reserved.MoveToDocuments(documents, needed); err != nil {
		return nil, nil, err
	}
	return objects, documents, nil
}

func unmarshalObjects(raw json.RawMessage) ([]*unstructured.Unstructured, error) {
	var decoded []any
	if err := kubejson.Unmarshal(raw, &decoded); err != nil { // integers stay integers
		return nil, fmt.Errorf("decode the objects: %w", err)
	}
	if len(decoded) > kube.MaxObjects {
		return nil, fmt.Errorf("the sandbox returned more than %d objects", kube.MaxObjects)
	}
	objects := make([]*unstructured.Unstructured, 0, len(decoded))
	for _, object := range decoded {
		fields, ok := object.(map[string]any)
		if !ok {
			return nil, errors.New("the sandbox returned an object that is no map")
		}
		objects = append(objects, &unstructured.Unstructured{Object: fields})
	}
	return objects, nil
}

// cloneMaps copies the nested maps in values, because Helm modifies them.
func cloneMaps(values map[string]any) map[string]any {
	copied := make(map[string]any, len(values))
	for key, value := range values {
		if nested, ok := value.(map[string]any); ok {
			value = cloneMaps(nested)
		}
		copied[key] = value
	}
	return copied
}
